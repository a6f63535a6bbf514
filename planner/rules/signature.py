"""The language of the rules: which dims of an op's tensors are the same letter.

A pattern such as `input … i, weight o i, bias? o -> … o` names each tensor argument and its dims.
`…` stands for any number of dims, aligned on the right and broadcast; `[d]` is a letter that may
not be split; `g·c` is a product whose first size is the argument `groups`; `?` marks an optional
tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.planner.extent import ONE, Extent
from autopar.planner.ops import Op, Tensor, Value, refs
from autopar.planner.rules.terms import UNIT, Dim, Leaf, product, size_of

Dims = tuple[Dim, ...]
_MANY = ("…", "[…]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The dims of an op's tensors in letters; a letter in `whole` may not be split.

    Where `is_opaque`, nothing is known of the op but its batch.
    """

    operands: tuple[tuple[str, Dims], ...]
    results: tuple[tuple[str, Dims], ...]
    whole: frozenset[str] = frozenset()
    letters: Mapping[str, Dim] = field(default_factory=dict)
    is_opaque: bool = False

    def fits(self, case: Case) -> bool:
        """Whether the dims have the sizes that the tensors have."""
        return all(
            tuple(map(size_of, dims)) == tuple(case.shape(name))
            for name, dims in (*self.operands, *self.results)
            if name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op with the shapes of its tensors, as the functions of the table see it.

    `tiles` holds, for a slice whose fellows tile the whole dim, the sizes of all the tiles and the
    position of this one.
    """

    op: Op
    tensors: Mapping[str, Tensor]
    tiles: tuple[tuple[Extent, ...], int] | None = None

    def shape(self, tensor: str) -> tuple[Extent, ...]:
        """Return the shape of a tensor."""
        return self.tensors[tensor].shape

    def argument(self, *names: str) -> Value:
        """Return the first of these arguments that the op has."""
        for key, value in self.op.arguments:
            if key in names:
                return value
        return None

    def number(self, *names: str, default: int = 0) -> int:
        """Return an argument that is a whole number."""
        value = self.argument(*names)
        return value if isinstance(value, int) else default

    def numbers(self, *names: str) -> tuple[int, ...]:
        """Return an argument that is a list of whole numbers (or one of them)."""
        value = self.argument(*names)
        items = value if isinstance(value, tuple) else (value,)
        return tuple(item for item in items if isinstance(item, int))

    def tensor(self, name: str) -> str | None:
        """Return the tensor that is this argument, if one is given."""
        return next(refs(self.argument(name)), None)

    @property
    def first(self) -> str:
        """The first tensor argument."""
        return self.op.inputs[0]

    @property
    def result(self) -> str:
        """The first result."""
        return self.op.outputs[0]


class Letters:
    """Makes letters, each with its size; a dim of size one needs none."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, size: Extent) -> Dim:
        """Return a new letter."""
        if size == ONE:
            return UNIT
        self._count += 1
        return Leaf(f"x{self._count}", size)

    def of(self, shape: tuple[Extent, ...]) -> Dims:
        """Return new letters for all dims of a shape."""
        return tuple(map(self.new, shape))


def names_of(*dims: Dim) -> frozenset[str]:
    """Return the letters among dims."""
    return frozenset(dim.name for dim in dims if isinstance(dim, Leaf))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern."""

    operands: tuple[tuple[str, bool, tuple[str, ...]], ...]
    results: tuple[tuple[str, ...], ...]

    @staticmethod
    def parse(text: str) -> Pattern:
        """Parse a pattern of the table."""
        left, _, right = text.partition("->")
        operands = []
        for part in left.split(","):
            name, *tokens = part.split()
            operands.append((name.rstrip("?"), name.endswith("?"), tuple(tokens)))
        results = tuple(tuple(part.split()) for part in right.split(","))
        return Pattern(tuple(operands), results)

    def signature(self, case: Case) -> Signature:
        """Return the signature of one op, or raise ValueError where the pattern does not fit."""
        reading = _Reading(case)
        operands = []
        for name, optional, tokens in self.operands:
            tensor = case.tensor(name)
            if tensor is not None:
                operands.append((tensor, reading.dims(tokens, case.shape(tensor))))
            elif not optional:
                raise ValueError(f"{case.op.target} has no tensor {name}")
        results = [
            (tensor, reading.dims(tokens, case.shape(tensor)))
            for tokens, tensor in zip(self.results, case.op.outputs, strict=False)
        ]
        known = {tensor for tensor, _ in operands}
        for extra in case.op.inputs:
            if extra not in known:
                operands.append((extra, reading.letters.of(case.shape(extra))))
        return Signature(
            operands=tuple(operands),
            results=tuple(results),
            whole=frozenset(reading.whole),
            letters=reading.named,
        )


class _Reading:
    """The letters met so far while a pattern is laid over the shapes of one op."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.letters = Letters()
        self.named: dict[str, Dim] = {}
        self.whole: set[str] = set()

    def dims(self, tokens: tuple[str, ...], shape: tuple[Extent, ...]) -> Dims:
        many = len(shape) - sum(token not in _MANY for token in tokens)
        dims: list[Dim] = []
        for token in tokens:
            if token in _MANY:
                for k in range(many, 0, -1):
                    dims.append(self._many(k, shape[len(dims)], whole=token != "…"))
            else:
                if len(dims) == len(shape):
                    raise ValueError(f"{self.case.op.target}: no dim for {token}")
                dims.append(self._token(token, shape[len(dims)]))
        if len(dims) != len(shape):
            raise ValueError(f"{self.case.op.target}: {len(shape)} dims for {' '.join(tokens)}")
        return tuple(dims)

    def _many(self, position: int, size: Extent, *, whole: bool) -> Dim:
        if size == ONE:
            return UNIT
        dim = self.named.setdefault(f"…{position}", self.letters.new(size))
        if whole:
            self.whole |= names_of(dim)
        return dim

    def _token(self, token: str, size: Extent) -> Dim:
        match = re.fullmatch(r"(\w+)·(\[?)(\w+)\]?", token)
        if match is None:
            letter = token.strip("[]")
            return self._letter(letter, size, whole=token.startswith("["))
        outer_size = Extent.of(self.case.number("groups", default=1))
        inner_size = size.divided_by(outer_size)
        if inner_size is None:
            raise ValueError(f"{self.case.op.target}: {size} is not divisible by {outer_size}")
        outer = self._letter(match[1], outer_size, whole=False)
        return product((outer, self._letter(match[3], inner_size, whole=bool(match[2]))))

    def _letter(self, letter: str, size: Extent, *, whole: bool) -> Dim:
        if letter == "1" or size == ONE:
            return UNIT
        dim = self.named.setdefault(letter, self.letters.new(size))
        if whole:
            self.whole |= names_of(dim)
        return dim
