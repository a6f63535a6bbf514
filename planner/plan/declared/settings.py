"""The table of a plan's constraints, and how each value is parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

from autopar.planner.cluster.toml_reading import nearest, parse_bytes
from autopar.planner.costs.prediction import Offload, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.layers import Compile
from autopar.planner.plan.declared.constraints import (
    Declared,
    MemoryLimit,
    Objective,
    read_budget,
    read_deadline,
    read_units,
)
from autopar.planner.precision import (
    Allowed,
    Compression,
    Float8,
    Outer,
    Precision,
    precision_words,
)

Chosen = TypeVar("Chosen", bound=Enum)
_MOST = 10**9  # of rows, ranks: more is a typing error


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSetting:
    """A constraint: its field, its parser, and its words."""

    place: str  # in a constraints file: "limits.tp", or "objective" at its top
    field: str  # of Constraints
    read: Callable[[object, str], Any]  # parses a value; the text is its place, for messages
    text: str  # explains it in --help and in the docs
    example: str  # a value as TOML has it
    metavar: str = ""  # of the option
    say: str = "{name}={value}"  # how messages name the constraint


def declare(place: str, raw: object, *, origin: str, where: str) -> Declared:
    """Return a constraint parsed from a TOML value or an option's text."""
    setting = SETTINGS[place]
    value = setting.read(raw, where)
    text = setting.say.format(name=place.rpartition(".")[2], value=_as_text(raw))
    return Declared(place=place, field=setting.field, value=value, text=text, origin=origin)


def _as_text(raw: object) -> str:
    if isinstance(raw, list):
        return ", ".join(map(_as_text, raw))
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def read_count(value: object, where: str) -> int:
    """Return the integer, which must be at least 1."""
    number = _number(value)
    if number is None or not 1 <= number <= _MOST:
        raise InputError(
            f"{value!r} is not a count", where=where, expected=f"a whole number from 1 to {_MOST}"
        )
    return number


def _number(value: object) -> int | None:
    """Return an integer, also from digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_memory(value: object, where: str) -> MemoryLimit:
    """Return the limit in "70 GiB" or "90%"."""
    if not (isinstance(value, str) and value.strip().endswith("%")):
        return MemoryLimit(size_bytes=parse_bytes(value, where=where))
    try:
        share = float(value.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InputError(
            f"{value!r} is not a share", where=where, expected='above 0 and at most 100: "90%"'
        )
    return MemoryLimit(share=share)


def read_tolerance(value: object, where: str) -> float:
    """Return the fraction in "3%"; 0 needs no percent sign."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1 or not (text.endswith("%") or share == 0):
        raise InputError(
            f"{value!r} is not a share of the step",
            where=where,
            expected='"3%", or 0 for the fastest plan however complex',
        )
    return share


def read_name(value: object, where: str, known: type[Chosen]) -> Chosen:
    """Return the enum member with this name."""
    names = {str(one.value): one for one in known}
    if not isinstance(value, str) or value not in names:
        raise InputError(
            f"{value!r} is not known",
            where=where,
            expected=f"one of {', '.join(names)}",
            fix=nearest(str(value), names),
        )
    return names[value]


def _named(known: type[Chosen]) -> Callable[[object, str], Chosen]:
    return lambda value, where: read_name(value, where, known)


_LEVELS = ", ".join(str(level.value) for level in Zero)
_WHOLE_MODULES = " or ".join(str(level.value) for level in Zero if not level.shards_modules)


def _read_zero(value: object, where: str) -> Zero:
    level = _number(value)
    if level is None or level not in tuple(Zero):
        found = f"{value!r} is not a ZeRO level"
        raise InputError(found, where=where, expected=f"one of {_LEVELS}")
    return Zero(level)


def _read_schedule(value: object, where: str) -> ScheduleKind:
    return read_name(value, where, ScheduleKind)


def _alone(read: Callable[[object, str], Any]) -> Callable[[object, str], tuple[Any, ...]]:
    return lambda value, where: (read(value, where),)


def _each(read: Callable[[object, str], Any]) -> Callable[[object, str], tuple[Any, ...]]:
    def read_list(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise InputError(
                f"{value!r} is not a list of choices", where=where, expected="[one, or, several]"
            )
        return tuple(read(one, where) for one in value)

    return read_list


def _read_compression(value: object, where: str) -> tuple[Compression, ...]:
    names: dict[bool | str, tuple[Compression, ...]] = {one.value: (one,) for one in Compression}
    whole, half = Compression.NONE, Compression.HALF
    meanings = {True: (half,), False: (whole,), "either": (whole, half), **names}
    if not isinstance(value, (bool, str)) or value not in meanings:
        expected = f'true, false, "either" or one of {", ".join(Compression)}'
        raise InputError(f"{value!r} is no choice", where=where, expected=expected)
    return meanings[value]


def _read_truth(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{value!r} is no choice", where=where, expected="true or false")
    return value


_OUTERS = ", ".join(one for one in Outer if one.copies)


def _read_outer(value: object, where: str) -> Outer:
    found = read_name(value, where, Outer)
    if not found.copies:
        raise InputError(f"{value!r} averages nothing", where=where, expected=f"one of {_OUTERS}")
    return found


def _read_allowed(value: object, where: str) -> tuple[Allowed, ...]:
    names = value.split(",") if isinstance(value, str) else [value]
    return tuple(read_name(one, where, Allowed) for one in names)


def _read_bucket(value: object, where: str) -> int:
    return parse_bytes(value, where=where)


Figure = str | int | float | None


class DemandOptions(TypedDict, total=False):
    """The demands that are options of `autopar plan` and keywords of `autopar.plan`.

    Each is one row. The option, the key of a constraints file and its line in
    docs/constraints-file.md are made from this row: `max_tp` is the option `--max-tp`.
    """

    # fmt: off
    global_batch: Annotated[int | None, DemandSetting(
        place="global_batch", field="global_batch", read=read_count,
        say="a global batch of {value}", metavar="ROWS", example="512",
        text="rows of one step, all devices together",
    )]
    precision: Annotated[str | None, DemandSetting(
        place="precision", field="precision", read=_named(Precision),
        say="precision {value}", metavar="TYPE", example='"bf16"',
        text=f"type of weights and activations: {precision_words()}",
    )]
    compile: Annotated[str | None, DemandSetting(
        place="compile", field="compile", read=_named(Compile),
        say="compile {value}", metavar="WHAT", example='"layers"',
        text="what torch.compile takes: layers (each separately), fused (it also sends messages "
        "during matrix products), none; default: on GPUs layers or none, whichever is faster",
    )]
    float8: Annotated[str | None, DemandSetting(
        place="float8", field="float8", read=_named(Float8),
        say="float8 {value}", metavar="SCALES", example='"tensorwise"',
        text="how linear layers multiply in float8, by torchao: tensorwise, rowwise, mxfp8, none",
    )]
    offload: Annotated[str | None, DemandSetting(
        place="offload", field="offloads", read=_alone(_named(Offload)),
        say="offload {value}", metavar="WHAT", example='"optimizer"',
        text="what is in host memory: optimizer (gradients and optimizer states; the CPU does the "
        "step), outer (the same for the outer optimizer), none; default: whichever is better",
    )]
    sync_every: Annotated[int | None, DemandSetting(
        place="choices.sync_every", field="sync_every", read=read_count,
        say="{value} local steps", metavar="STEPS", example="64",
        text="let replicas of the model train alone for so many (local) steps, until an outer "
        "optimizer averages them; changes what is learnt",
    )]
    outer: Annotated[str | None, DemandSetting(
        place="choices.outer", field="outer", read=_read_outer,
        say="outer optimizer {value}", metavar="NAME", example='"nesterov"',
        text=f"the outer optimizer of local steps: {_OUTERS} (the mean of the parameters)",
    )]
    outer_parts: Annotated[int | None, DemandSetting(
        place="choices.outer_parts", field="outer_parts", read=read_count,
        say="outer steps in {value} parts", metavar="N", example="4",
        text="parts of the model that have outer steps in turn, sent while training goes on",
    )]
    allow: Annotated[str | None, DemandSetting(
        place="choices.allow", field="allowed", read=_read_allowed,
        say="allowed: {value}", metavar="WHAT", example='"local-steps"',
        text="choices that change what is learnt and that the search may make, with commas: "
        f"{', '.join(Allowed)}",
    )]
    max_tp: Annotated[int | None, DemandSetting(
        place="limits.tp", field="max_tensor", read=read_count,
        say="at most tp={value}", metavar="N", example="8",
        text="largest number of tensor ranks",
    )]
    max_pp: Annotated[int | None, DemandSetting(
        place="limits.pp", field="max_pipeline", read=read_count,
        say="at most pp={value}", metavar="N", example="8",
        text="largest number of pipeline ranks",
    )]
    max_dp: Annotated[int | None, DemandSetting(
        place="limits.dp", field="max_data", read=read_count,
        say="at most dp={value}", metavar="N", example="64",
        text="largest number of data ranks",
    )]
    memory: Annotated[str | None, DemandSetting(
        place="limits.memory", field="memory", read=read_memory,
        say="at most {value} a device", metavar="SIZE", example='"70 GiB"',
        text='memory to use of each device: "70 GiB", or a share: "95%"; 86% by default',
    )]
    host_memory: Annotated[str | None, DemandSetting(
        place="limits.host_memory", field="host_memory", read=read_memory,
        say="at most {value} of the host for a device", metavar="SIZE", example='"200 GiB"',
        text='memory of the host to use for each device: "200 GiB", or a share; 80% by default',
    )]
    objective: Annotated[str | None, DemandSetting(
        place="objective", field="objective", read=_named(Objective),
        say="objective {value}", metavar="WHAT", example='"step-time"',
        text="what to minimise: step-time (the default), memory, or cost; if given, it also "
        "chooses among --gpus 1,2",
    )]
    samples: Annotated[Figure, DemandSetting(
        place="samples", field="samples", read=read_units,
        say="{value} samples in all", metavar="N", example='"20M"',
        text="rows of the whole training",
    )]
    tokens: Annotated[Figure, DemandSetting(
        place="tokens", field="tokens", read=read_units,
        say="{value} tokens in all", metavar="N", example='"10B"',
        text="tokens of the whole training, in place of samples",
    )]
    deadline: Annotated[str | None, DemandSetting(
        place="deadline", field="deadline_seconds", read=read_deadline,
        say="a deadline of {value}", metavar="TIME", example='"24h"',
        text="time for the whole training: 90min, 24h, 3d, 1w",
    )]
    budget: Annotated[Figure, DemandSetting(
        place="budget", field="budget_usd", read=read_budget,
        say="a budget of {value} USD", metavar="USD", example='"500"',
        text="US dollars for the whole training: 500, 2k",
    )]
    tolerance: Annotated[Figure, DemandSetting(
        place="tolerance", field="tolerance", read=read_tolerance,
        say="the simplest plan within {value}", metavar="SHARE", example='"3%"',
        text='how much slower a simpler plan may be than the fastest: "3%" (the default), or 0',
    )]
    # fmt: on


def _pin(
    key: str, field: str, read: Callable[[object, str], Any], example: str, text: str
) -> DemandSetting:
    return DemandSetting(place=f"pins.{key}", field=field, read=read, example=example, text=text)


_IN_FILES_ALONE = (
    _pin("pp", "pipeline", read_count, "2", "pipeline ranks"),
    _pin("dp", "data", read_count, "2", "data ranks"),
    _pin("tp", "tensor", read_count, "2", "tensor ranks; pp × dp × tp is the number of devices"),
    _pin(
        "shard", "shard", read_count, "2",
        "data ranks that hold one sharded copy (ZeRO); divides dp",
    ),
    _pin("microbatch", "microbatch", read_count, "1", "rows of a microbatch"),
    _pin("stages_per_rank", "stages_per_rank", read_count, "1", "stages of a pipeline rank"),
    _pin(
        "zero", "zero_levels", _alone(_read_zero), "1",
        f"{_LEVELS}; with zero bubble {_WHOLE_MODULES}",
    ),
    _pin(
        "schedule", "schedules", _alone(_read_schedule), '"1f1b"', ", ".join(map(str, ScheduleKind))
    ),
    DemandSetting(
        place="choices.schedules", field="schedules", read=_each(_read_schedule),
        say="schedules {value}", example='["gpipe", "1f1b"]', text="may be used",
    ),
    DemandSetting(
        place="choices.zero", field="zero_levels", read=_each(_read_zero),
        say="ZeRO levels {value}", example="[0, 1]", text="may be used",
    ),
    DemandSetting(
        place="choices.compressed_gradients", field="compression", read=_read_compression,
        say="compressed gradients: {value}", example='"either"',
        text='sum gradients in 16 bits: true, false (the default) or "either"; "int8"',
    ),
    DemandSetting(
        place="choices.microbatch_statistics", field="statistics_apart", read=_read_truth,
        say="statistics of microbatches: {value}", example="false",
        text="true: batch norms may compute their statistics from one microbatch at a time",
    ),
    DemandSetting(
        place="choices.bucket_sizes", field="bucket_bytes", read=_each(_read_bucket),
        say="buckets of {value}", example='["25 MiB", "100 MiB"]', text="may be used for gradients",
    ),
)  # fmt: skip


def _rows_by_keyword() -> Iterator[tuple[str, DemandSetting]]:
    for keyword, hint in get_type_hints(DemandOptions, include_extras=True).items():
        (row,) = hint.__metadata__
        yield keyword, row


BY_KEYWORD: Mapping[str, DemandSetting] = MappingProxyType(dict(_rows_by_keyword()))
# by their places in a constraints file
SETTINGS: Mapping[str, DemandSetting] = MappingProxyType(
    {one.place: one for one in (*BY_KEYWORD.values(), *_IN_FILES_ALONE)}
)
SECTIONS = ("pins", "limits", "choices")


def option_of(keyword: str) -> str:
    """Return the option of `autopar plan` for a keyword of `autopar.plan`."""
    return f"--{keyword.replace('_', '-')}"


def keys_of(section: str) -> tuple[str, ...]:
    """Return the keys of a section of a constraints file; "" is its top."""
    places = (place.rpartition(".") for place in SETTINGS)
    return tuple(key for own, _, key in places if own == section)


def example_file() -> str:
    """Return a constraints file with every key, each with a comment that explains it."""
    options = {row.place: option_of(keyword) for keyword, row in BY_KEYWORD.items()}
    lines = []
    for section in ("", *SECTIONS):
        lines += ["", f"[{section}]"] if section else []
        for key in keys_of(section):
            row = SETTINGS[f"{section}.{key}" if section else key]
            option = f" ({options[row.place]})" if row.place in options else ""
            lines.append(f"{f'{key} = {row.example}':<40}# {row.text}{option}")
    return "\n".join(lines)
