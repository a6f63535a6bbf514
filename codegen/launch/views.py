"""Turns a plan and settings into the files that start its training under a scheduler."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from jinja2 import Environment

from autopar.codegen.launch.settings import (
    DOCKER,
    KUBERNETES,
    QUOTING,
    SKYPILOT,
    SLURM,
    LaunchSettings,
)
from autopar.codegen.script.render import FILTERS, templates_of
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.words import arrangement_words

VOLUME = "/volume"  # where a volume is in the file system of a pod
_PROCESSORS_OF_DEVICE = 4  # CPU cores for a rank and its DataLoader workers
_LAST_SECONDS = 20  # torchrun stops waiting for its ranks 20 s before the job is killed
_LONGEST_NAME = 40
_FORM_FACTOR = re.compile(r"-(sxm\d?|pcie|nvl|oam)\b.*$")

# The files of each scheduler; a file has the name of its template.
TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        SLURM: ("job.sbatch",),
        KUBERNETES: ("jobset.yaml", "trainjob.yaml", "Dockerfile", "requirements.txt"),
        DOCKER: ("Dockerfile", "requirements.txt"),
        SKYPILOT: ("sky.yaml", "requirements.txt"),
    }
)
WITHOUT_STORAGE = (KUBERNETES, DOCKER, SKYPILOT)  # files outside a volume vanish with the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a job's folder contains; `packages` are the lines of requirements.txt."""

    python: str  # "3.11"
    packages: tuple[str, ...]
    folders: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """A plan's job under a scheduler, as the templates read it."""

    target: str  # the scheduler
    title: str
    name: str
    nodes: int
    processes: int  # of a node
    devices: int  # of a node; 0 without GPUs
    device: str
    arguments: tuple[str, ...]  # of the script
    metrics: str  # the script's metrics file, which `arguments` also name
    settings: LaunchSettings
    content: Content
    mount: str = VOLUME

    @property
    def restarts(self) -> int:
        """How often a failed training is restarted."""
        return int(self.settings.restarts)

    @property
    def notice(self) -> int:
        """The seconds between the scheduler's signal and the end of the job."""
        return int(self.settings.notice)

    @property
    def patience(self) -> int:
        """How many seconds torchrun waits for its ranks after a signal."""
        return max(self.notice - _LAST_SECONDS, self.notice // 2)

    @property
    def cores(self) -> str:
        """The CPU cores of a node."""
        return self.settings.cpus or str(self.processes * _PROCESSORS_OF_DEVICE)

    @property
    def directives(self) -> Iterator[str]:
        """The options of sbatch."""
        settings = self.settings
        yield f"--job-name={self.name}"
        yield f"--nodes={self.nodes}"
        yield "--ntasks-per-node=1"
        chosen = {
            "gres": settings.gres or (f"gpu:{self.devices}" if self.devices else None),
            "cpus-per-task": self.cores,
            "mem": settings.memory and f"{settings.memory}G",
            "partition": settings.partition,
            "account": settings.account,
            "qos": settings.qos,
            "time": settings.time,
        }
        yield from (f"--{option}={value}" for option, value in chosen.items() if value)
        yield f"--signal=USR1@{settings.notice}"
        yield "--requeue"
        yield "--open-mode=append"
        yield "--output=job-%j.log"

    @property
    def first_host(self) -> str:
        """The first pod's name in the network of a JobSet."""
        return f"{self.name}-node-0-0.{self.name}"

    @property
    def image(self) -> str:
        """The image of pods."""
        return self.settings.image or f"{self.name}:latest"

    @property
    def limits(self) -> Mapping[str, str]:
        """The limits of a pod, which gets all devices of a node so that tensor ranks share it."""
        memory = self.settings.memory
        return {
            **({self.settings.resource: str(self.devices)} if self.devices else {}),
            "cpu": self.cores,
            **({"memory": f"{memory}Gi"} if memory else {}),
        }

    @property
    def base_image(self) -> str:
        """The image in the Dockerfile's FROM."""
        given = self.settings.image if self.target == DOCKER else None
        return given or f"python:{self.content.python}-slim"

    @property
    def copies(self) -> tuple[tuple[str, ...], ...]:
        """The sources and the target of each COPY line of the Dockerfile."""
        content = self.content
        return (*((one, one) for one in content.folders), (*content.files, "./"))

    @property
    def command(self) -> tuple[str, ...]:
        """The command of a container on one machine."""
        return ("torchrun", "--nproc-per-node", str(self.processes), "train.py", *self.arguments)

    @property
    def sky_resources(self) -> Mapping[str, str]:
        """What a task of SkyPilot asks of each node."""
        settings, found = self.settings, dict[str, str]()
        if self.devices:
            kind = settings.accelerator or _FORM_FACTOR.sub("", self.device).upper()
            found["accelerators"] = f"{kind}:{self.devices}"
        wanted = {"cpus": settings.cpus, "memory": settings.memory}
        found |= {key: f"{value}+" for key, value in wanted.items() if value}
        return found | ({"image_id": f"docker:{settings.image}"} if settings.image else {})


def job_name(plan: StoredPlan, settings: LaunchSettings) -> str:
    """Return the job's name: that of --set, or the model's name as all schedulers accept it."""
    found = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower(), flags=re.ASCII).strip("-")
    return settings.name or found[:_LONGEST_NAME].strip("-") or "training"


def job_of(
    plan: StoredPlan,
    target: str,
    settings: LaunchSettings,
    *,
    content: Content,
    arguments: tuple[str, ...],
    metrics: str,
) -> LaunchJob:
    """Return the job of a plan; raises if its nodes are unlike."""
    kinds = dict.fromkeys(f"{one.devices} {one.device.name}" for one in plan.cluster.nodes)
    if len(kinds) > 1:
        raise InputError(
            f"the plan's nodes are unlike ({', '.join(kinds)}), and a job's nodes are alike",
            fix="start torchrun on each node yourself: the script's head says how",
        )
    processes, nodes = plan.cluster.nodes[0].devices, len(plan.cluster.nodes)
    machines = f"{nodes} {'node' if nodes == 1 else 'nodes'} of {processes} {plan.machines.device}"
    return LaunchJob(
        target=target,
        title=f"Trains {plan.model.name}: {arrangement_words(plan.arrangement)}, on {machines}.",
        name=job_name(plan, settings),
        nodes=nodes,
        processes=processes,
        devices=0 if plan.machines.backend == "gloo" else processes,
        device=plan.machines.device,
        arguments=arguments,
        metrics=metrics,
        settings=settings,
        content=content,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFile:
    """A file of a job: its name and its text."""

    name: str
    text: str


def launch_files(job: LaunchJob) -> tuple[LaunchFile, ...]:
    """Return the files that start a job under its scheduler."""
    return rendered(dict.fromkeys(TARGETS[job.target], job))


@cache  # a template is compiled once
def _templates() -> Environment:
    return templates_of("autopar.codegen.launch", {**FILTERS, **QUOTING})


def rendered(views: Mapping[str, object]) -> tuple[LaunchFile, ...]:
    """Render views; each key is the name of a file, and of its template without `.j2`."""
    templates = _templates()
    return tuple(
        LaunchFile(name=name, text=templates.get_template(f"{name}.j2").render(view=view))
        for name, view in views.items()
    )
