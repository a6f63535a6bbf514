"""Turns a plan and settings into the files that start its training under a scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from jinja2 import Environment

from autopar.codegen.launch.settings import (
    DOCKER,
    KUBERNETES,
    SKYPILOT,
    SLURM,
    LaunchSettings,
    bare,
    command,
    copied,
    directive,
    flag,
    image,
    json_text,
    lists,
    members,
    plain,
    pod_argument,
    requirement,
    shell,
    yaml,
)
from autopar.codegen.script.render import FILTERS, templates_of
from autopar.codegen.text.values import Source
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.words import arrangement_words

VOLUME = "/volume"  # where a volume is in the file system of a pod
_PROCESSORS_OF_DEVICE = 4  # CPU cores: one for the rank, the others for its DataLoader workers
_LAST_SECONDS = 20  # torchrun stops waiting for its ranks 20 s before the job is killed
_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a job's folder contains; `packages` are the lines of requirements.txt."""

    python: str  # "3.11"
    packages: tuple[str, ...]
    folders: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """The facts that all schedulers need: machines, processes, arguments of the script."""

    title: str
    name: str
    nodes: int
    processes: int  # of a node
    devices: int  # of a node; 0 without GPUs
    device: str
    arguments: tuple[str, ...]
    metrics: str  # the script's metrics file, which `arguments` also name


def job_name(plan: StoredPlan, settings: LaunchSettings) -> str:
    """Return the job's name: that of --set name=…, or one made from the model's name."""
    return settings.name or _as_name(plan.model.name)


def job_of(plan: StoredPlan, name: str, arguments: tuple[str, ...], *, metrics: str) -> LaunchJob:
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
        title=f"Trains {plan.model.name}: {arrangement_words(plan.arrangement)}, on {machines}.",
        name=name,
        nodes=nodes,
        processes=processes,
        devices=0 if plan.machines.backend == "gloo" else processes,
        device=plan.machines.device,
        arguments=arguments,
        metrics=metrics,
    )


def _as_name(text: str) -> str:
    """Return a name as all schedulers accept it, from any text."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower(), flags=re.ASCII).strip("-")
    return found[:_LONGEST_NAME].strip("-") or "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmView:
    """The parts of a script for sbatch."""

    title: str
    directives: tuple[str, ...]
    python: str
    nodes: int
    processes: int
    restarts: int
    notice: int
    patience: int
    arguments: tuple[str, ...]
    metrics: str


def _slurm(job: LaunchJob, settings: LaunchSettings) -> SlurmView:
    notice = int(settings.notice)
    return SlurmView(
        title=job.title,
        directives=tuple(_directives(job, settings)),
        python=settings.python,
        nodes=job.nodes,
        processes=job.processes,
        restarts=int(settings.restarts),
        notice=notice,
        patience=_patience(notice),
        arguments=job.arguments,
        metrics=job.metrics,
    )


def _directives(job: LaunchJob, settings: LaunchSettings) -> Iterator[str]:
    """Yield the options of sbatch."""
    yield f"--job-name={job.name}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    gres = settings.gres or (f"gpu:{job.devices}" if job.devices else None)
    chosen = {
        "gres": gres,
        "cpus-per-task": settings.cpus or job.processes * _PROCESSORS_OF_DEVICE,
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


def _patience(notice: int) -> int:
    """Return how long torchrun waits for its ranks after a signal."""
    return max(notice - _LAST_SECONDS, notice // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledValue:
    """A key with its value in a YAML map."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesView:
    """The parts of a JobSet, and of a TrainJob with its runtime."""

    title: str
    name: str
    first_host: str
    namespace: tuple[str, ...]  # one or none
    labels: tuple[LabelledValue, ...]
    annotations: tuple[LabelledValue, ...]  # of pods
    image: str
    nodes: int
    processes: int
    resources: tuple[LabelledValue, ...]
    deadline_seconds: tuple[int, ...]  # one or none
    volume: tuple[str, ...]  # one or none
    mount: str
    restarts: int
    notice: int
    patience: int
    arguments: tuple[str, ...]


_QUEUE = "kueue.x-k8s.io/queue-name"
_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"


def _kubernetes(job: LaunchJob, settings: LaunchSettings) -> KubernetesView:
    notice, deadline = int(settings.notice), settings.time_seconds
    return KubernetesView(
        title=job.title,
        name=job.name,
        first_host=f"{job.name}-node-0-0.{job.name}",
        namespace=_given(settings.namespace),
        labels=tuple(LabelledValue(key=_QUEUE, value=one) for one in _given(settings.queue)),
        annotations=tuple(
            LabelledValue(key=_TOPOLOGY, value=one) for one in _given(settings.topology)
        ),
        image=settings.image or f"{job.name}:latest",
        nodes=job.nodes,
        processes=job.processes,
        resources=tuple(_resources(job, settings)),
        deadline_seconds=() if deadline is None else (deadline,),
        volume=_given(settings.volume),
        mount=VOLUME,
        restarts=int(settings.restarts),
        notice=notice,
        patience=_patience(notice),
        arguments=job.arguments,
    )


def _given(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)


def _resources(job: LaunchJob, settings: LaunchSettings) -> Iterator[LabelledValue]:
    """Yield the limits of a pod, which gets all devices of a node so that tensor ranks share it."""
    if job.devices:
        yield LabelledValue(key=settings.resource, value=str(job.devices))
    yield LabelledValue(
        key="cpu", value=settings.cpus or str(job.processes * _PROCESSORS_OF_DEVICE)
    )
    for size in _given(settings.memory):
        yield LabelledValue(key="memory", value=f"{size}Gi")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerView:
    """The parts of a Dockerfile."""

    title: str
    name: str
    image: str
    copies: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]


def _docker(job: LaunchJob, settings: LaunchSettings, content: Content) -> DockerView:
    return DockerView(
        title=job.title,
        name=job.name,
        image=settings.image or f"python:{content.python}-slim",
        copies=(*((one, one) for one in content.folders), (*content.files, "./")),
        command=("torchrun", "--nproc-per-node", str(job.processes), "train.py", *job.arguments),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilotView:
    """The parts of a task of SkyPilot."""

    title: str
    name: str
    nodes: int
    processes: int
    resources: tuple[LabelledValue, ...]
    bucket: tuple[str, ...]  # one or none
    mount: str
    restarts: int
    arguments: tuple[str, ...]


def _skypilot(job: LaunchJob, settings: LaunchSettings) -> SkyPilotView:
    return SkyPilotView(
        title=job.title,
        name=job.name,
        nodes=job.nodes,
        processes=job.processes,
        resources=tuple(_sky_resources(job, settings)),
        bucket=_given(settings.volume),
        mount=VOLUME,
        restarts=int(settings.restarts),
        arguments=job.arguments,
    )


_FORM_FACTOR = re.compile(r"-(sxm\d?|pcie|nvl|oam)\b.*$")


def _sky_resources(job: LaunchJob, settings: LaunchSettings) -> Iterator[LabelledValue]:
    if job.devices:
        kind = settings.accelerator or _FORM_FACTOR.sub("", job.device).upper()
        yield LabelledValue(key="accelerators", value=f"{kind}:{job.devices}")
    wanted = {"cpus": settings.cpus, "memory": settings.memory}
    for key, value in wanted.items():
        yield from (LabelledValue(key=key, value=f"{one}+") for one in _given(value))
    for one in _given(settings.image):
        yield LabelledValue(key="image_id", value=f"docker:{one}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFile:
    """A file of a job: its name and its text."""

    name: str
    text: str


Views = Mapping[str, object]  # by the name of the file
REQUIREMENTS = "requirements.txt"


def _slurm_files(job: LaunchJob, settings: LaunchSettings, _: Content) -> Views:
    return {"job.sbatch": _slurm(job, settings)}


def _docker_files(job: LaunchJob, settings: LaunchSettings, content: Content) -> Views:
    return {"Dockerfile": _docker(job, settings, content), REQUIREMENTS: content}


def _kubernetes_files(job: LaunchJob, settings: LaunchSettings, content: Content) -> Views:
    """Return the files of a job, and those of its image."""
    view, own = _kubernetes(job, settings), LaunchSettings(name=job.name)
    return {"jobset.yaml": view, "trainjob.yaml": view, **_docker_files(job, own, content)}


def _skypilot_files(job: LaunchJob, settings: LaunchSettings, content: Content) -> Views:
    return {"sky.yaml": _skypilot(job, settings), REQUIREMENTS: content}


# The names of files are those of their templates.
TARGETS: Mapping[str, Callable[[LaunchJob, LaunchSettings, Content], Views]] = MappingProxyType(
    {
        SLURM: _slurm_files,
        KUBERNETES: _kubernetes_files,
        DOCKER: _docker_files,
        SKYPILOT: _skypilot_files,
    }
)
WITHOUT_STORAGE = (KUBERNETES, DOCKER, SKYPILOT)  # files outside a volume vanish with the machine
_FILTERS: Mapping[str, Callable[..., Source]] = MappingProxyType(
    {
        **FILTERS,
        "shell": shell,
        "yaml": yaml,
        "plain": plain,
        "json_text": json_text,
        "members": members,
        "key": bare,
        "flag": flag,
        "lists": lists,
        "pod_argument": pod_argument,
        "directive": directive,
        "image": image,
        "copied": copied,
        "command": command,
        "requirement": requirement,
    }
)


@cache  # a template is compiled once
def _templates() -> Environment:
    return templates_of("autopar.codegen.launch", _FILTERS)


def launch_files(
    target: str, job: LaunchJob, settings: LaunchSettings, content: Content
) -> tuple[LaunchFile, ...]:
    """Return the files that start a job under a scheduler."""
    return rendered(TARGETS[target](job, settings, content))


def rendered(views: Views) -> tuple[LaunchFile, ...]:
    """Render views; each key is the name of a file, and of its template without `.j2`."""
    templates = _templates()
    return tuple(
        LaunchFile(name=name, text=templates.get_template(f"{name}.j2").render(view=view))
        for name, view in views.items()
    )
