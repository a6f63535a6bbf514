"""Turns plain values into Python text, as Ruff lays it out; lists what templates import."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.text.expressions import comment, is_identifier, string
from autopar.planner.graph.layouts import CONVERSIONS
from autopar.planner.rules.table import split_functions

WIDTH = 100


class Source(str):
    """Python text that this package has made from literals and identifiers only."""

    __slots__ = ()


def literal(value: object) -> Source:
    """Return a plain value as Python, in ASCII."""
    if isinstance(value, str):
        return Source(string(value))
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return Source(f"({inner},)" if len(value) == 1 else f"({inner})")
    if isinstance(value, list):
        return Source(f"[{', '.join(map(literal, value))}]")
    if isinstance(value, dict):
        pairs = (f"{literal(key)}: {literal(item)}" for key, item in value.items())
        return Source(f"{{{', '.join(pairs)}}}")
    if value is None or type(value) in (bool, int, float):
        text = repr(value)
        return Source(f'float("{text}")' if text in ("inf", "-inf", "nan") else text)
    raise TypeError(f"{type(value).__name__} is no plain value")


def identifier(value: object) -> Source:
    """Return a text that is an identifier; raises for any other."""
    if not isinstance(value, str) or not is_identifier(value):
        raise ValueError(f"{value!r} is no identifier")
    return Source(value)


def remark(value: str) -> Source:
    """Return a text as a comment of one line."""
    return Source(f"# {comment(value)}")


def prose(value: str) -> str:
    """Return a text that is safe in a docstring: one line without double quotes and backslashes."""
    one_line = re.sub(r"[^\x20-\x7e×·…–≥≤]+", " ", value)
    return one_line.replace("\\", "/").replace('"', "'").rstrip()


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Items in brackets: a call with its arguments, or a tuple."""

    opening: str
    items: tuple[str | Bracketed, ...]
    closing: str

    @property
    def flat(self) -> str:
        """The group on one line."""
        items = [item.flat if isinstance(item, Bracketed) else item for item in self.items]
        lone = "," if self.opening == "(" and len(items) == 1 else ""  # a tuple of one
        return f"{self.opening}{', '.join(items)}{lone}{self.closing}"

    @property
    def _is_call(self) -> bool:
        return is_identifier(self.opening[:-1].rpartition(".")[2].lstrip("*"))

    def laid_out(self, *, before: int = 0, after: int = 0, indent: int = 0) -> str:
        """Return the group after `before` characters, as Ruff lays it out.

        It is one line if it fits. Otherwise the items of a call are on one inner line if they fit.
        In all other cases there is one item per line.
        """
        if before + len(self.flat) + after <= WIDTH:
            return self.flat
        margin = " " * (indent + 4)
        inside = self.flat[len(self.opening) : -len(self.closing)]
        if self._is_call and len(margin + inside) <= WIDTH:
            return f"{self.opening}\n{margin}{inside}\n{' ' * indent}{self.closing}"
        lines = [
            item.laid_out(before=indent + 4, after=1, indent=indent + 4)
            if isinstance(item, Bracketed)
            else item
            for item in self.items
        ]
        inner = "".join(f"{margin}{line},\n" for line in lines)
        return f"{self.opening}\n{inner}{' ' * indent}{self.closing}"


Row = tuple[str, str | Bracketed, str]  # the text before a value, the value, a comment


def call(function: str, *arguments: str | Bracketed) -> Bracketed:
    """Return a call."""
    return Bracketed(f"{function}(", arguments, ")")


def tuple_of(*items: str | Bracketed) -> Bracketed:
    """Return a tuple."""
    return Bracketed("(", items, ")")


def unpacked(items: str | Bracketed) -> str | Bracketed:
    """Return items as an entry of a larger tuple: a bracketed group gets a star."""
    if isinstance(items, str):
        return items
    return Bracketed(f"*{items.opening}", items.items, items.closing)


def row(key: str | Bracketed, value: str | Bracketed) -> tuple[str, str | Bracketed]:
    """Return the text before a dict row's value, and the value, for one key or several."""
    if isinstance(key, str):
        return f"{key}: ", value
    return "", Bracketed("**dict.fromkeys(", (key, value), ")")


def assigned(name: str, value: Bracketed, said: str = "") -> Source:
    """Return `name = value`, with a comment after it or, if it does not fit, above it."""
    line = f"{name} = {value.flat}  {remark(said)}" if said else f"{name} = {value.flat}"
    if len(line) <= WIDTH:
        return Source(line)
    text = f"{name} = {value.laid_out(before=len(name) + 3)}"
    return Source(f"{remark(said)}\n{text}" if said else text)


def table(
    name: str,
    brackets: tuple[str, str],
    rows: Sequence[tuple[str, str | Bracketed, str]],
    *,
    meaning: str = "",
) -> Source:
    """Return `name = …` with a row per line; `meaning` is a comment on the table.

    A comment that does not fit after its row is put above it.
    """
    opening, closing = brackets
    lines = [f"{name} = {opening}  {remark(meaning)}" if meaning else f"{name} = {opening}"]
    for lead, value, said in rows:
        flat = f"    {lead}{value.flat if isinstance(value, Bracketed) else value},"
        if said and len(flat) + 2 + len(remark(said)) > WIDTH:
            lines.append(f"    {remark(said)[: WIDTH - 4]}")
        elif said:
            lines.append(f"{flat}  {remark(said)}")
            continue
        if isinstance(value, Bracketed):
            flat = f"    {lead}{value.laid_out(before=4 + len(lead), after=1, indent=4)},"
        lines.append(flat)
    return Source("\n".join([*lines, closing]))


# The names that scripts import, by module: those that templates use, and those of printed forwards.
_FROM: Mapping[str, str] = MappingProxyType(
    {
        "argparse": "Namespace",
        "collections.abc": "Callable Iterable Iterator Mapping Sequence",
        "functools": "partial",
        "itertools": "islice",
        "pathlib": "Path",
        "typing": "Any",
        "torch": "Tensor nn",
        "torch.optim": "Optimizer",
        "autopar.runtime.data": (
            "Batch Weighed in_float32 loss_in read_batches read_dataset scale_loss with_plain"
        ),
        "autopar.runtime.data_parallel": "set_last wrap",
        "autopar.runtime.evaluation": (
            "Evaluation PlainModel check_first_step one_by_one read_evaluation with_gradients"
        ),
        "autopar.runtime.checkpointing": "Keeper",
        "autopar.runtime.model": (
            "ROWS Crossing StagePart compile_layers freeze keep_apart expand use_float8 "
            "shard_parameters submodules use_classes"
        ),
        "autopar.runtime.optimizer": (
            "LossScale OuterOptimizer adamw build_optimizer build_scheduler clip_by_global_norm "
            "multiply_gradients sum_replicated warmup_cosine"
        ),
        "autopar.runtime.pipeline": ("Pipeline Stage Tie build_schedule stage_at stage_indices"),
        "autopar.runtime.ranks": (
            "Axis Mesh warn_if_changed read_options refuse_changes seed_all start stop "
            "tell_errors_once"
        ),
        "autopar.runtime.recompute": "recompute save_on_host update_once",
        "autopar.runtime.tensor": "Split chunk_logits",
        "autopar.runtime.weights": "Recipe load_weights record",
    }
)
_FROM_IN_FORWARDS: Mapping[str, str] = MappingProxyType(
    {
        "collections.abc": "Mapping",
        "typing": "Any",
        "torch": "Tensor nn",
        "autopar.runtime.data": "scale_loss",
        "autopar.runtime.evaluation": "Absent Outputs named_outputs",
        "autopar.runtime.ranks": "Axis split_randomness",
        "autopar.runtime.tensor": " ".join(
            {"local_size", "whole_length", *split_functions()}
            | {one.function for one in CONVERSIONS.values()}
        ),
    }
)
_PLAIN = ("copy", "importlib", "math", "sys", "torch")
# For the plain PyTorch loop of `autopar verify --plain`, in addition.
_FROM_ALONE: Mapping[str, str] = MappingProxyType(
    {
        "itertools": "count",
        "unittest.mock": "patch",
        "torch.optim": "AdamW",
        "torch.optim.lr_scheduler": "LambdaLR",
        "torch.utils._python_dispatch": "TorchDispatchMode",
    }
)
_PLAIN_ALONE = ("hashlib", "random")


def _statements(plain: Iterable[str], members: Mapping[str, str]) -> Mapping[str, str]:
    whole = {name: f"import {name}" for name in plain}
    listed = ((module, name) for module, names in members.items() for name in names.split())
    return MappingProxyType(whole | {name: f"from {one} import {name}" for one, name in listed})


_FUNCTIONAL = {"F": "import torch.nn.functional as F"}
IN_FORWARDS = MappingProxyType({**_statements(["math", "torch"], _FROM_IN_FORWARDS), **_FUNCTIONAL})
KNOWN = MappingProxyType({**_statements(_PLAIN, _FROM), **IN_FORWARDS})
KNOWN_ALONE = MappingProxyType(
    {name: statement for name, statement in KNOWN.items() if "autopar" not in statement}
    | {**_statements(_PLAIN_ALONE, _FROM_ALONE)}
)
