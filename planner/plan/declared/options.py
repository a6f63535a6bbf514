"""Turns the options of the command line into declarations, and joins them with a file's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from autopar.planner.cluster.reading import nearest
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import Constraints, Declared, constraints_of
from autopar.planner.plan.declared.file import read_constraints
from autopar.planner.plan.declared.settings import declare, keys_of

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "limits.tp": "--max-tp",
        "limits.pp": "--max-pp",
        "limits.dp": "--max-dp",
        "limits.memory": "--memory",
        "objective": "--objective",
        "tolerance": "--tolerance",
        "samples": "--samples",
        "tokens": "--tokens",
        "deadline": "--deadline",
        "budget": "--budget",
        "global_batch": "--global-batch",
        "precision": "--precision",
    }
)

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "pipeline": "pp",
        "data": "dp",
        "tensor": "tp",
        "fsdp": "zero",
        "batch": "microbatch",
        "batch_size": "microbatch",
    }
)  # what others call the keys of --pin


def gathered_constraints(
    pins: Sequence[str], options: Mapping[str, object], file: Path | None
) -> Constraints:
    """Return all that was declared; what the command line says holds against the file.

    `options` are the values of `--max-tp` and its like by their place in a file ("limits.tp");
    None where an option was not given.
    """
    declared = [] if file is None else list(read_constraints(file))
    declared += parse_pins(pins)
    for place, (option, value) in _given(options):
        declared.append(declare(place, value, origin=option, where=option))
    return constraints_of(declared)


def _given(options: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, object]]]:
    for place, value in options.items():
        if value is not None:
            yield place, (OPTIONS[place], value)


def parse_pins(texts: Iterable[str], *, option: str = "--pin") -> tuple[Declared, ...]:
    """Return what texts such as "dp=2,tp=4" pin."""
    pins: dict[str, Declared] = {}
    for text in texts:
        for pair in text.split(","):
            key, equals, value = (part.strip() for part in pair.partition("="))
            if not equals or not key or not value or "=" in value:
                raise InputError(
                    f"{option} {text!r} is not of the form key=value", fix=f"{option} dp=2,tp=4"
                )
            name = key.replace("-", "_")
            known = keys_of("pins")
            if name not in known:
                meant = WORDS.get(name)
                raise InputError(
                    f"{option}: there is no {key!r} to pin",
                    expected=f"one of {', '.join(known)}",
                    fix=f"did you mean {meant!r}?" if meant else nearest(name, known),
                )
            if name in pins and pins[name].text != f"{name}={value}":
                raise InputError(f"{option} pins {key} twice: {pins[name].text} and {pair.strip()}")
            pins[name] = declare(f"pins.{name}", value, origin=option, where=f"{option} {key}")
    return tuple(pins.values())
