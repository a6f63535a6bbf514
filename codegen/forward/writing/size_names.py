"""Chooses names for the sizes that a body uses more than once: `batch, seq, _ = x.shape`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, count

from autopar.codegen.forward.ops.sizes import Wanted, wanted
from autopar.codegen.forward.reading.split import Split
from autopar.codegen.forward.text.expressions import Fact, Held, pieces
from autopar.codegen.forward.text.identifiers import identifier
from autopar.codegen.forward.writing.statements import Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of one value that a body gives names to: one entry per dim, "" where unused.

    `same` holds the names of sizes that another value has given before.
    """

    held: Held
    names: tuple[str, ...]
    same: tuple[str, ...]

    def name(self, dim: int) -> str:
        """Return the name of one size, "" where it has none."""
        return self.names[dim] or self.same[dim]

    @property
    def text(self) -> str:
        """The right way to unpack the sizes, with `{}` for the value."""
        named = [i for i, name in enumerate(self.names) if name]
        if len(named) == 1:
            return f"{self.names[named[0]]} = {{}}.shape[{named[0]}]"
        return f"{', '.join(name or '_' for name in self.names)} = {{}}.shape"


def shapes_of(statements: Sequence[Statement], split: Split, frame: Set[str]) -> Iterator[Shape]:
    """Name the sizes of a value that are used more than once."""
    facts = [
        piece
        for statement in statements
        for piece in pieces(statement.expression)
        if isinstance(piece, Fact) and piece.what.startswith("shape[")
    ]
    counts = Counter(fact.held for fact in facts)
    taken = {*frame, "self", "x", "q", "k", "v", "y"}
    sizes: dict[Wanted, str] = {}
    for held, uses in counts.items():
        if uses < 2:
            continue
        used = {fact.what for fact in facts if fact.held == held}
        names, same = [], []
        for position, size in enumerate(wanted(split, held.tensor, held.layout)):
            is_used = f"shape[{position}]" in used
            same.append(sizes.get(size, "") if is_used else "")
            is_new = is_used and not same[-1]
            name = _fresh(split.axes.text(size.dim), taken) if is_new else ""
            names.append(name)
            taken.add(name)
            if is_new:
                sizes[size] = name
        yield Shape(held=held, names=tuple(names), same=tuple(same))


def _fresh(axis: str, taken: set[str]) -> str:
    name = identifier(re.sub(r"_\d+$", "", axis))
    is_one = re.fullmatch(r"\w+", axis) is not None
    stem = "size" if re.fullmatch(r"x?\d*", name) else name if is_one else "length"
    return next(n for n in chain([stem], (f"{stem}{i}" for i in count(2))) if n not in taken)
