"""Reads a table of published runs (CSV) into rows, or tells every fault with its line."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from autopar.planner.cluster.toml_reading import nearest
from autopar.planner.errors import InputError, gathered
from autopar.planner.files import read_given

_MOST_COUNT = 2**31
_MOST_LAYERS = 10_000
MOST_FAULTS = 20  # told together; a table of another kind would have thousands


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run, in the words of the table; None where it says nothing."""

    table: str  # file
    line: int
    source: str
    model_name: str
    model_family: str
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    experts: int | None
    topk: int | None
    params_b: float | None
    gpu: str
    gpus: int | None
    gpus_per_node: int | None
    intra_bw: str
    inter_bw: str
    dtype: str
    tp: int | None
    sp: bool | None
    cp: int | None
    pp: int | None
    vpp: int | None
    ep: int | None
    dp: int | None
    fsdp: str
    micro_batch: int | None
    global_batch: int | None
    recompute: str
    flash_attention: bool | None
    torch_compile: bool | None
    iteration_time_s: float | None
    tokens_per_s_per_gpu: float | None
    samples_per_s: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    peak_memory_gb: float | None
    notes: str

    @property
    def where(self) -> str:
        """The place of the row, for messages."""
        return f"{self.table}:{self.line}"


def stated(value: int | None) -> int:
    """Return a figure that the caller has made sure is there."""
    assert value is not None
    return value


def _text(value: str) -> str:
    return value


def _count(value: str) -> int | None:
    if not value:
        return None
    number = float(value)
    if not number.is_integer() or not 1 <= number <= _MOST_COUNT:
        raise ValueError(f"a whole number of at least 1, at most {_MOST_COUNT}")
    return int(number)


def _layers(value: str) -> int | None:
    """Return a number of layers, which are priced one by one."""
    layers = _count(value)
    if layers is not None and layers > _MOST_LAYERS:
        raise ValueError(f"a whole number of at least 1, at most {_MOST_LAYERS}")
    return layers


def _figure(value: str) -> float | None:
    if not value:
        return None
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError("a positive, finite number")
    return number


def _flag(value: str) -> bool | None:
    if value.casefold() not in ("", "true", "false"):
        raise ValueError("True, False or nothing")
    return value.casefold() == "true" if value else None


def _rounded(value: str) -> float | None:
    """Return a figure that its source cut to a whole number; 0 (below 1) counts as not stated."""
    return None if value and float(value) == 0 else _figure(value)


_PARSERS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {"str": _text, "int | None": _count, "float | None": _figure, "bool | None": _flag}
)
_OWN_PARSERS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {"samples_per_s": _rounded, "layers": _layers}
)
COLUMNS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {
        field.name: _OWN_PARSERS.get(field.name, _PARSERS[str(field.type)])
        for field in fields(Row)
        if field.name not in ("table", "line")
    }
)


def read_tables(paths: Sequence[Path]) -> tuple[Row, ...]:
    """Return the rows of all tables."""
    return tuple(row for path in paths for row in read_table(path))


def read_table(path: Path) -> tuple[Row, ...]:
    """Return the rows of one table, or one error that tells all its faults."""
    records = _records(path)
    faults: list[str] = []
    rows: list[Row] = []
    for line, record in records:
        values, found = _values(record, line)
        faults += found
        if not found:
            row = _with_batch(Row(table=path.name, line=line, **values))  # type: ignore[arg-type]
            faults += [f"line {line}: {fault}" for fault in contradictions(row)]
            rows.append(row)
    if faults:
        told = faults[:MOST_FAULTS]
        more = len(faults) - len(told)
        raise gathered([*told, *([f"… and {more} more"] if more else [])], where=str(path))
    if not rows:
        raise InputError("the table has no rows", where=str(path))
    return tuple(rows)


def _with_batch(row: Row) -> Row:
    """Return a row with its global batch: without a pipeline, one microbatch of each data rank."""
    if row.global_batch or row.pp != 1 or not (row.dp and row.micro_batch):
        return row
    return replace(row, global_batch=row.dp * row.micro_batch)


def _records(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return line and cells of every row; refuses what is no such table."""
    text = read_given(path, what="the table")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        _require_columns(reader.fieldnames or (), path)
        return [(reader.line_num, record) for record in reader]
    except csv.Error as error:
        raise InputError(f"the table is not well-formed CSV: {error}", where=str(path)) from None


def _require_columns(names: Sequence[str], path: Path) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    missing = [name for name in COLUMNS if name not in names]
    if len(missing) == len(COLUMNS):
        raise InputError("this is no table of published runs", where=str(path), expected=_EXPECTED)
    faults = [f"the column {name!r} is there twice" for name in twice]
    faults += [f"the column {name!r} is missing{_near(name, names)}" for name in missing]
    if faults:
        told = faults[:MOST_FAULTS]
        raise gathered(told, where=f"{path}, line 1", fix=_EXPECTED)


_EXPECTED = f"the first line names the columns: {', '.join(COLUMNS)}"


def _near(name: str, names: Sequence[str]) -> str:
    hint = nearest(name, [one for one in names if one not in COLUMNS])
    return f" ({hint})" if hint else ""


def _values(record: Mapping[str, str], line: int) -> tuple[dict[str, object], list[str]]:
    """Return the values of one row and its faults."""
    if None in record or None in record.values():
        return {}, [f"line {line}: more or fewer cells than the first line has columns"]
    values: dict[str, object] = {}
    faults: list[str] = []
    for name, parse in COLUMNS.items():
        cell = record[name].strip()
        try:
            values[name] = parse(cell)
        except ValueError as error:
            needed = str(error) if "could not convert" not in str(error) else "a number"
            faults.append(f"line {line}: {name} is {cell!r}, needed: {needed}")
    return values, faults


def contradictions(row: Row) -> Iterator[str]:
    """Yield the contradictions within one row."""
    if row.gpus and row.tp and row.pp and row.dp:
        context = row.cp or 1
        product = row.tp * row.pp * row.dp * context
        if product != row.gpus:
            factors = f"tp {row.tp} · cp {context} · pp {row.pp} · dp {row.dp}"
            yield f"{factors} = {product} ranks, but gpus is {row.gpus}"
