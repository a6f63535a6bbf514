"""The keys of `--set key=value` for jobs, and quoting for the languages of a job's files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from autopar.codegen.text.values import Source, literal
from autopar.planner.errors import InputError

SLURM, KUBERNETES, DOCKER, SKYPILOT = "slurm", "kubernetes", "docker", "skypilot"
_ALL = (SLURM, KUBERNETES, DOCKER, SKYPILOT)


class AllowedValues(NamedTuple):
    """The values that a key may have: a pattern, and the same in words."""

    pattern: str
    words: str


class LaunchKey(NamedTuple):
    """What a key means, which values it may have, and for which schedulers."""

    what: str
    values: AllowedValues
    targets: tuple[str, ...]


_NAME = AllowedValues(
    r"[a-z0-9](?:[-a-z0-9]{0,38}[a-z0-9])?", "small letters, digits and -, at most 40"
)
_OBJECT = AllowedValues(
    r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", "the name of an object of Kubernetes"
)
_WORD = AllowedValues(r"[A-Za-z0-9][\w.,:@+-]{0,199}", "letters, digits and . , : @ + _ -")
_NUMBER = AllowedValues(r"\d{1,4}", "a whole number")
_COUNT = AllowedValues(r"[1-9]\d{0,5}", "a whole number of 1 or more")
_PATH = AllowedValues(r"[^\x00-\x1f]+", "a path")
_TIME = AllowedValues(r"(?:\d{1,3}-)?\d{1,3}:[0-5]\d:[0-5]\d", "HOURS:MM:SS or DAYS-HH:MM:SS")
_NOTICE = AllowedValues(r"[1-9]\d{1,4}", "a whole number of 10 or more")
_IMAGE = AllowedValues(r"\w[\w.:/@-]{0,254}", "the name of an image")
_RESOURCE = AllowedValues(r"[a-z0-9][a-z0-9.-]{0,200}/[A-Za-z0-9][\w.-]{0,60}", "DOMAIN/NAME")
_LABEL = AllowedValues(r"[A-Za-z0-9][\w./-]{0,200}", "a label of nodes")
_DEVICE = AllowedValues(r"[A-Za-z0-9][\w.-]{0,60}", _WORD.words)

_BUT_DOCKER = (SLURM, KUBERNETES, SKYPILOT)


def _key(what: str, values: AllowedValues, *targets: str, default: str | None = None) -> Any:
    """Return a field of `LaunchSettings`, with the facts about its key."""
    return field(default=default, metadata={"key": LaunchKey(what, values, targets)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """The values of the keys; None where the scheduler's own default applies."""

    name: str | None = _key("the job's name", _NAME, *_ALL)
    partition: str | None = _key("the partition", _WORD, SLURM)
    account: str | None = _key("who pays", _WORD, SLURM)
    qos: str | None = _key("the quality of service", _WORD, SLURM)
    gres: str | None = _key("the devices of a node, gpu:h100:8", _WORD, SLURM)
    python: str = _key("the interpreter, such as .venv/bin/python", _PATH, SLURM, default="python")
    time: str | None = _key("the time limit", _TIME, SLURM, KUBERNETES)
    notice: str = _key(
        "seconds to write a checkpoint before the job is killed",
        _NOTICE,
        SLURM,
        KUBERNETES,
        default="300",
    )
    cpus: str | None = _key("processors of a node", _COUNT, *_BUT_DOCKER)
    memory: str | None = _key("memory of a node in GiB", _COUNT, *_BUT_DOCKER)
    restarts: str = _key(
        "how often a failed training is restarted", _NUMBER, *_BUT_DOCKER, default="3"
    )
    image: str | None = _key(
        "the image; for docker, the one to start from", _IMAGE, KUBERNETES, DOCKER, SKYPILOT
    )
    volume: str | None = _key(
        "where checkpoints stay: a claim of a persistent volume, or a bucket",
        _OBJECT,
        KUBERNETES,
        SKYPILOT,
    )
    queue: str | None = _key("Kueue's local queue", _OBJECT, KUBERNETES)
    namespace: str | None = _key("the namespace", _NAME, KUBERNETES)
    resource: str = _key(
        "how the cluster calls its devices, nvidia.com/gpu",
        _RESOURCE,
        KUBERNETES,
        default="nvidia.com/gpu",
    )
    topology: str | None = _key(
        "the label of nodes that are near each other, for Kueue", _LABEL, KUBERNETES
    )
    accelerator: str | None = _key("the device as SkyPilot calls it", _DEVICE, SKYPILOT)

    @property
    def time_seconds(self) -> int | None:
        """The time limit."""
        if self.time is None:
            return None
        days, _, clock = self.time.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


KEYS: Mapping[str, LaunchKey] = MappingProxyType(
    {one.name: one.metadata["key"] for one in fields(LaunchSettings)}
)


def read_settings(target: str, given: Sequence[str]) -> LaunchSettings:
    """Return the settings from texts "key=value", or raise InputError for all faulty ones."""
    pairs = [(key, is_pair, value) for key, is_pair, value in (one.partition("=") for one in given)]
    faults = [
        fault for key, is_pair, value in pairs if (fault := _fault(target, key, is_pair, value))
    ]
    if faults:
        known = ", ".join(key for key, one in KEYS.items() if target in one.targets)
        raise InputError("; ".join(faults), where="--set", expected=f"key=value of {known}")
    return LaunchSettings(**{key: value for key, _, value in pairs})


def _fault(target: str, key: str, is_pair: str, value: str) -> str:
    one = KEYS.get(key)
    if not is_pair or one is None:
        return f"{key[:40]!r} is no key" if is_pair else f"{key[:40]!r} has no ="
    if target not in one.targets:
        return f"{key} is for {' and '.join(one.targets)}"
    if not re.fullmatch(one.values.pattern, value, re.ASCII):
        return f"{key} ({one.what}) is {value[:60]!r}, and must be {one.values.words}"
    return ""


# Quoting: each function returns a text as words of one language, or refuses it.

_MOST_CHARACTERS = 4096
_PATH_TEXT = r"[\w.@+-]+(/[\w.@+-]+)*/?"


def shell(text: str) -> Source:
    """Return a text as one word of a POSIX shell."""
    return Source(shlex.quote(_in_a_line(text, "a shell")))


def yaml(text: str) -> Source:
    """Return a text as a YAML string in double quotes."""
    return Source(json.dumps(_in_a_line(text, "YAML"), ensure_ascii=False))


def plain(value: object) -> Source:
    """Return a plain value in the form that JSON, YAML and TOML share."""
    if isinstance(value, str):
        return yaml(value)
    if isinstance(value, tuple):
        return Source(f"[{', '.join(map(plain, value))}]")
    if type(value) in (bool, int, float):
        return Source(json.dumps(value))
    raise TypeError(f"{type(value).__name__} has no common form")


def json_text(text: str) -> Source:
    """Return any text as a JSON string, which escapes what could end a line."""
    return Source(json.dumps(text))


def members(settings: Mapping[str, object]) -> Source:
    """Return keys and plain values as the members of a JSON object."""
    return Source(", ".join(f"{yaml(name)}: {plain(value)}" for name, value in settings.items()))


def flag(value: object) -> Source:
    """Return what follows the name of an option in a shell: a word, or nothing for True."""
    return Source("") if value is True else Source(f" {shell(str(value))}")


def lists(value: object) -> Source:
    """Return a plain value as Python, with lists in the place of tuples."""
    return literal([list(one) for one in value] if isinstance(value, tuple) else value)


def pod_argument(text: str) -> Source:
    """Return an argument of a container as YAML; escape $(NAME), which Kubernetes would replace."""
    return yaml(text.replace("$(", "$$("))


def copied(paths: Sequence[str]) -> Source:
    """Return the paths of a COPY line; refuse $NAME and wildcards, which Docker would replace."""
    return Source(
        json.dumps([_matching(_PATH_TEXT, "a path in a Dockerfile", one) for one in paths])
    )


def command(words: Sequence[str]) -> Source:
    """Return a command in a Dockerfile, as JSON, which no shell reads."""
    return Source(json.dumps([_in_a_line(one, "a Dockerfile") for one in words]))


def _matching(pattern: str, what: str, text: str) -> Source:
    if len(text) > _MOST_CHARACTERS or not re.fullmatch(pattern, text, re.ASCII):
        raise InputError(
            f"{text[:60]!r} cannot be written as {what}",
            expected="letters, digits, and . , : @ + / = - where they have a meaning",
        )
    return Source(text)


def _in_a_line(text: str, language: str) -> str:
    """Return a text without control characters, which could end a line, or raise."""
    if len(text) > _MOST_CHARACTERS or not text.isprintable():
        raise InputError(
            f"{text[:60]!r} cannot be quoted for {language}",
            expected=f"printable characters on one line, at most {_MOST_CHARACTERS:,}",
        )
    return text


# The filters of templates. The last four are for places without quotes.
QUOTING: Mapping[str, Callable[..., Source]] = MappingProxyType(
    {
        "shell": shell,
        "yaml": yaml,
        "plain": plain,
        "json_text": json_text,
        "members": members,
        "flag": flag,
        "lists": lists,
        "pod_argument": pod_argument,
        "copied": copied,
        "command": command,
        "key": partial(_matching, r"[A-Za-z][\w-]*", "a key"),
        "directive": partial(
            _matching, r"--[a-z-]+(=[\w.,:@+/=%-]+)?", "an option in a #SBATCH line"
        ),
        "image": partial(_matching, r"\w[\w.:/@-]*", "the name of an image"),
        "requirement": partial(_matching, r"[A-Za-z0-9][\w.-]*(==[\w.]+)?", "a requirement of pip"),
    }
)
