"""Tells which imports a printed source needs, beside the user's own classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from autopar.codegen.forward.text.wrapping import WIDTH
from autopar.planner.layouts import CONVERSIONS

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "Tensor": "torch",
        "nn": "torch",
        "Any": "typing",
        "Mapping": "collections.abc",
        "Axis": "autopar.runtime.ranks",
        "split_randomness": "autopar.runtime.ranks",
        "Absent": "autopar.runtime.evaluation",
        "Outputs": "autopar.runtime.evaluation",
        "named_outputs": "autopar.runtime.evaluation",
        "local_size": "autopar.runtime.tensor",
        "scale_loss": "autopar.runtime.data",
        "vocab_parallel_cross_entropy": "autopar.runtime.tensor",
        "vocab_parallel_embedding": "autopar.runtime.tensor",
        "vocab_parallel_embedding_bag": "autopar.runtime.tensor",
    }
    | {c.function: "autopar.runtime.tensor" for c in CONVERSIONS.values()}
)
_WHOLE: Mapping[str, str] = MappingProxyType(
    {"torch": "import torch", "F": "import torch.nn.functional as F"}
)

IMPORTED = frozenset(_MODULES.keys() | _WHOLE.keys())  # what no variable may be called


def imports_of(sources: Iterable[str]) -> tuple[str, ...]:
    """Return the import lines of some sources, one per module, sorted."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    names: dict[str, list[str]] = defaultdict(list)
    for name in sorted(used & _MODULES.keys()):
        names[_MODULES[name]].append(name)
    lines = [from_line(module, found) for module, found in names.items()]
    return tuple(sorted([*lines, *(_WHOLE[name] for name in used & _WHOLE.keys())]))


def from_line(module: str, names: Sequence[str]) -> str:
    """Return the statement that imports names from a module, on one line where that has room."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
