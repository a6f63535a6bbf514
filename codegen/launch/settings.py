"""What `--set key=value` may say of a job, and for which schedulers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from autopar.planner.errors import InputError

SLURM, KUBERNETES, DOCKER, SKYPILOT = "slurm", "kubernetes", "docker", "skypilot"
_ALL = (SLURM, KUBERNETES, DOCKER, SKYPILOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchKey:
    """What a key means, which values it has, and for which schedulers."""

    what: str
    pattern: str
    values: str  # the pattern in words
    targets: tuple[str, ...]


_NAME = r"[a-z0-9](?:[-a-z0-9]{0,38}[a-z0-9])?"
_OBJECT = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_WORD = r"[A-Za-z0-9][\w.,:@+-]{0,199}"
_COUNT = r"[1-9]\d{0,5}"
_A_NAME = "small letters, digits and -, at most 40"
_AN_OBJECT = "the name of an object of Kubernetes"
_A_WORD = "letters, digits and . , : @ + _ -"
_A_COUNT = "a whole number of 1 or more"

KEYS: Mapping[str, LaunchKey] = MappingProxyType(
    {
        "name": LaunchKey(what="the job's name", pattern=_NAME, values=_A_NAME, targets=_ALL),
        "partition": LaunchKey(
            what="the partition", pattern=_WORD, values=_A_WORD, targets=(SLURM,)
        ),
        "account": LaunchKey(what="who pays", pattern=_WORD, values=_A_WORD, targets=(SLURM,)),
        "qos": LaunchKey(
            what="the quality of service", pattern=_WORD, values=_A_WORD, targets=(SLURM,)
        ),
        "gres": LaunchKey(
            what="the devices of a node, gpu:h100:8",
            pattern=_WORD,
            values=_A_WORD,
            targets=(SLURM,),
        ),
        "python": LaunchKey(
            what="the interpreter, such as .venv/bin/python",
            pattern=r"[^\x00-\x1f]+",
            values="a path",
            targets=(SLURM,),
        ),
        "time": LaunchKey(
            what="the time limit",
            pattern=r"(?:\d{1,3}-)?\d{1,3}:[0-5]\d:[0-5]\d",
            values="HOURS:MM:SS or DAYS-HH:MM:SS",
            targets=(SLURM, KUBERNETES),
        ),
        "notice": LaunchKey(
            what="seconds to write a checkpoint before the job is killed",
            pattern=r"[1-9]\d{1,4}",
            values="a whole number of 10 or more",
            targets=(SLURM, KUBERNETES),
        ),
        "cpus": LaunchKey(
            what="processors of a node",
            pattern=_COUNT,
            values=_A_COUNT,
            targets=(SLURM, KUBERNETES, SKYPILOT),
        ),
        "memory": LaunchKey(
            what="memory of a node in GiB",
            pattern=_COUNT,
            values=_A_COUNT,
            targets=(SLURM, KUBERNETES, SKYPILOT),
        ),
        "restarts": LaunchKey(
            what="how often a failed training is restarted",
            pattern=r"\d{1,4}",
            values="a whole number",
            targets=(SLURM, KUBERNETES, SKYPILOT),
        ),
        "image": LaunchKey(
            what="the image; for docker, the one to start from",
            pattern=r"\w[\w.:/@-]{0,254}",
            values="the name of an image",
            targets=(KUBERNETES, DOCKER, SKYPILOT),
        ),
        "volume": LaunchKey(
            what="where checkpoints stay: a claim of a persistent volume, or a bucket",
            pattern=_OBJECT,
            values=_AN_OBJECT,
            targets=(KUBERNETES, SKYPILOT),
        ),
        "queue": LaunchKey(
            what="Kueue's local queue", pattern=_OBJECT, values=_AN_OBJECT, targets=(KUBERNETES,)
        ),
        "namespace": LaunchKey(
            what="the namespace", pattern=_NAME, values=_A_NAME, targets=(KUBERNETES,)
        ),
        "resource": LaunchKey(
            what="how the cluster calls its devices, nvidia.com/gpu",
            pattern=r"[a-z0-9][a-z0-9.-]{0,200}/[A-Za-z0-9][\w.-]{0,60}",
            values="DOMAIN/NAME",
            targets=(KUBERNETES,),
        ),
        "topology": LaunchKey(
            what="the label of nodes that are near each other, for Kueue",
            pattern=r"[A-Za-z0-9][\w./-]{0,200}",
            values="a label of nodes",
            targets=(KUBERNETES,),
        ),
        "accelerator": LaunchKey(
            what="the device as SkyPilot calls it",
            pattern=r"[A-Za-z0-9][\w.-]{0,60}",
            values=_A_WORD,
            targets=(SKYPILOT,),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The values of the keys; None where the scheduler's own default applies."""

    name: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    python: str = "python"
    time: str | None = None
    notice: str = "300"
    cpus: str | None = None
    memory: str | None = None
    restarts: str = "3"
    image: str | None = None
    volume: str | None = None
    queue: str | None = None
    namespace: str | None = None
    resource: str = "nvidia.com/gpu"
    topology: str | None = None
    accelerator: str | None = None

    @property
    def time_seconds(self) -> int | None:
        """The time limit."""
        if self.time is None:
            return None
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


assert {one.name for one in fields(LaunchSettings)} == set(KEYS)


def read_settings(target: str, given: Sequence[str]) -> LaunchSettings:
    """Return the settings from texts "key=value", or raise InputError for all faulty ones."""
    pairs = [(key, is_pair, value) for key, is_pair, value in (one.partition("=") for one in given)]
    faults = [
        fault for key, is_pair, value in pairs if (fault := _fault(target, key, is_pair, value))
    ]
    if faults:
        known = ", ".join(key for key, one in KEYS.items() if target in one.targets)
        raise InputError("; ".join(faults), where="--set", expected=f"key=value of {known}")
    return replace(LaunchSettings(), **{key: value for key, _, value in pairs})


def _fault(target: str, key: str, is_pair: str, value: str) -> str:
    one = KEYS.get(key)
    if not is_pair or one is None:
        return f"{key[:40]!r} is no key" if is_pair else f"{key[:40]!r} has no ="
    if target not in one.targets:
        return f"{key} is for {' and '.join(one.targets)}"
    if not re.fullmatch(one.pattern, value, re.ASCII):
        return f"{key} ({one.what}) is {value[:60]!r}, and must be {one.values}"
    return ""
