"""One line of the table: an op's signature, what it computes, what it keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from autopar.planner.graph.ops import Op, Value, refs
from autopar.planner.rules.shapes import ShapeFunction, opaque
from autopar.planner.rules.signature import Case, Pattern, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProducts:
    """`batch` products of m × k by k × n, made `times` times one after the other.

    `left` and `right` name the factors among the op's inputs, "" is what the op itself has made.
    """

    left: str
    right: str
    batch: int
    m: int
    n: int
    k: int
    times: int = 1

    @property
    def flops(self) -> int:
        """Two for each multiply and add."""
        return 2 * self.batch * self.m * self.n * self.k * self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """What one op computes on one rank.

    `flops` and `backward_flops` are those beside the products, whose backward is one product for
    each factor that needs a gradient. `steps` follow each other, each with an elementwise kernel
    beside its products, or so many as `unfused` where no library has one for all; `kept` elements
    are made for the backward alone.
    """

    products: tuple[MatrixProducts, ...] = ()
    flops: int = 0
    backward_flops: int = 0
    steps: int = 0
    unfused: int = 1
    kept: int = 0

    @property
    def forward_flops(self) -> int:
        """All FLOPs of the forward."""
        return self.flops + sum(product.flops for product in self.products)


class OpSizes(Protocol):
    """The sizes of an op's tensors on one rank."""

    op: Op

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of an operand or result."""


Computing = Callable[[OpSizes], Computation]


def given(sizes: OpSizes, name: str) -> Value:
    """Return an argument of the op, None where it has none of this name."""
    return dict(sizes.op.arguments).get(name)


def number(sizes: OpSizes, name: str, default: int = 0) -> int:
    """Return an argument that is a whole number."""
    value = given(sizes, name)
    return value if isinstance(value, int) else default


def tensors(sizes: OpSizes, name: str) -> tuple[str, ...]:
    """Return the tensors that are an argument, or stand in it."""
    return tuple(refs(given(sizes, name)))


def tensor(sizes: OpSizes, *names: str) -> str:
    """Return the tensor that is the first of these arguments that the op has."""
    return next(found for name in names for found in tensors(sizes, name))


class OpKind(StrEnum):
    """What sort of op it is, where the letters do not tell how it is priced, split or printed."""

    OTHER = ""
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    LOOKUP = "look-up"  # rows of a table
    BAG = "bag"  # sums of rows of a table
    NORM = "norm"
    BATCH_NORM = "batch norm"
    SOFTMAX = "softmax"
    DROPOUT = "dropout"
    EXPONENTIAL = "exponential"  # takes at least one for each element
    CROSS_ENTROPY = "cross entropy"
    CLASS_LOSS = "class loss"  # of given log-probabilities
    LOSS = "loss"
    SUM = "sum"
    MEAN = "mean"
    ADDITION = "addition"
    SUBTRACTION = "subtraction"
    NEGATION = "negation"  # of what may be taken from something else
    MULTIPLICATION = "multiplication"
    DIVISION = "division"
    POWER = "power"
    QUOTIENT = "quotient"  # or its remainder, in whole numbers
    CLAMP = "clamp"  # from below
    RECURRENT = "recurrent"
    GROUPED = "grouped"  # products of groups of rows by matrices of their own
    ALONG = "along"  # works along a dim
    SORT = "sort"
    ARGSORT = "argsort"
    COUNT = "count"  # how often numbers occur
    VALUES = "values"  # that occur
    VIEW = "view"
    COPY = "copy"
    CAST = "cast"  # to another type or device, where it is not of it
    CONTIGUOUS = "contiguous"  # the same in a plain order in memory, where it is not
    DIAGONAL = "diagonal"  # or what lies on one side of it, or its sum
    INDEX = "index"
    WRITE = "write"  # over all of a tensor
    WRITE_AT = "write at"  # places
    ADD_AT = "add at"  # places
    SCATTER = "scatter"  # of a part, into a new tensor
    FILL = "fill"  # with a plain number
    PART = "part"  # of a tensor
    PARTS = "parts"  # that tile a tensor
    EXPAND = "expand"
    REPEAT = "repeat"
    RANGE = "range"
    NEW = "new"  # of a given shape, in the type of a tensor
    LIKE = "like"  # a tensor in shape and type
    GRADIENT = "gradient"  # of some tensors for others, as torch.autograd.grad takes it

    @property
    def is_class_loss(self) -> bool:
        """Whether it is a loss over classes, of which each row has one."""
        return self in (OpKind.CROSS_ENTROPY, OpKind.CLASS_LOSS)

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, with a reduction."""
        return self.is_class_loss or self is OpKind.LOSS

    @property
    def reads_table(self) -> bool:
        """Whether it takes rows of a table: ranks that have other rows make a sum together."""
        return self in (OpKind.LOOKUP, OpKind.BAG)

    @property
    def keeps_entries(self) -> bool:
        """Whether the result has the entries of the first input, each once, or casts of them."""
        return self in (OpKind.VIEW, OpKind.COPY, OpKind.CAST, OpKind.CONTIGUOUS)


class Traffic(StrEnum):
    """What an op moves through memory."""

    ALL = "all"  # reads its inputs, writes its results
    NONE = "none"  # another look at the same memory
    GATHERED = "gathered"  # reads as much of a table as it writes
    BAGGED = "bagged"  # reads a row of a table for each index, and writes one for each bag


class Linear(StrEnum):
    """In which inputs an op is linear, so that a partial sum may pass through it."""

    UNTOLD = "untold"
    NO = "no"
    FIRST = "first"  # in the first, for the others only tell a place, a shape or a type
    JOINTLY = "jointly"  # in all inputs together: a sum, a view, a concatenation
    EACH = "each"  # in each input while the others are whole: a product


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForBackward:
    """One thing kept for the backward: `what` is an argument, "out" or letters with a type."""

    what: str
    needs: str = ""  # the argument that must need a gradient; "" is any
    dtype: str = ""  # for letters: their element type, "" is the result's
    only: str = ""  # the condition on the kernel or the arguments under which it is kept

    @staticmethod
    def parse_all(text: str) -> tuple[SavedForBackward, ...]:
        """Parse the column of the table: comma-separated entries."""
        return tuple(
            SavedForBackward.parse(entry.strip()) for entry in text.split(",") if entry.strip()
        )

    @staticmethod
    def parse(entry: str) -> SavedForBackward:
        """Parse one entry: `input if weight`, `out`, `f32(b h q)`, `bool(*) when fused`."""
        entry, _, only = entry.partition(" when ")
        what, _, needs = entry.partition(" if ")
        dtype, bracket, letters = what.partition("(")
        if bracket:
            return SavedForBackward(
                what=letters.rstrip(")"), needs=needs, dtype=dtype, only=only or "always"
            )
        return SavedForBackward(what=what, needs=needs, only=only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is known of an op.

    `flops` is the product of these letters' sizes, twice (multiply and add); "*" stands for all
    letters of the operands and results. Where no letters tell, `computes` does: the products of an
    LSTM, the FLOPs of a Cholesky factor. `saves` lists what the backward needs: `x if y` is
    the tensor argument x where the argument y needs a gradient, `out` is the result, `f32(a b)`
    is a tensor of that type over these letters, `own(computed)` what `computes` says is kept, in
    the type of the first input. `added` is the argument that is added to what the op makes of the
    others: a plain number there makes a linear op affine. `sizes` is the argument that tells the
    sizes of the result, `cuts` are those that tell sizes or places along the argument `dim`.
    `written_by` is the op that makes a new tensor with this part of it written anew; `updates` are
    arguments that the op writes to without saying so in its schema. torch wants the arguments
    `alike` to be of one type ("*inputs": all tensors), and has no kernel of what `is_wide` in 16
    bits. `names` proposes what people call a letter.
    """

    target: str
    shape: Pattern | ShapeFunction
    contracts: tuple[str, ...] = ()
    computes: Computing | None = None
    saves: tuple[SavedForBackward, ...] = ()
    kind: OpKind = OpKind.OTHER
    traffic: Traffic = Traffic.ALL
    linear: Linear = Linear.UNTOLD
    added: str = "bias"
    sizes: str = ""
    cuts: tuple[str, ...] = ()
    written_by: str = ""
    updates: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    is_wide: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def factors(self) -> tuple[str, ...]:
        """The arguments that a product multiplies: these, and these alone, it keeps."""
        return tuple(entry.what for entry in self.saves) if len(self.contracts) == 1 else ()

    def signature(self, case: Case) -> Signature:
        """Return the op's signature; one that the rule does not fit is opaque."""
        read = self.shape.signature if isinstance(self.shape, Pattern) else self.shape
        try:
            found = read(case)
        except ValueError:
            return opaque(case)
        return found if found.fits(case) else opaque(case)


_SWITCHES = ("train", "training")
_CHANCES = ("p", "dropout", "dropout_p")


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers: torch marks it so, and it is not turned off."""
    if not _draws(op.target):
        return False
    arguments = dict(op.arguments)
    is_off = any(arguments.get(name) is False for name in _SWITCHES)
    return not is_off and all(arguments.get(name) != 0.0 for name in _CHANCES)


@lru_cache(maxsize=4096)
def _draws(target: str) -> bool:
    import torch  # seconds, which commands that draw nothing do without

    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(found, "tags", ())


def lines(
    targets: str,
    shape: Pattern | ShapeFunction | str,
    saves: str = "",
    *,
    names: str = "",
    contracts: str = "",
    alike: str = "",
    **facts: Any,
) -> list[Rule]:
    """Return a rule for each op of a line of the table, which may have further columns (`facts`).

    A group of letters in `contracts` is 2·∏(letters) FLOPs.
    """
    pairs = [pair.partition("=") for pair in names.split()]
    return [
        Rule(
            target=_full_name(target),
            shape=Pattern.parse(shape) if isinstance(shape, str) else shape,
            contracts=tuple(filter(None, contracts.split(","))),
            saves=SavedForBackward.parse_all(saves),
            names=MappingProxyType({letter: name for letter, _, name in pairs}),
            alike=tuple(alike.split()),
            **facts,
        )
        for target in targets.split()
    ]


def computing(
    targets: str,
    computes: Computing,
    saves: str = "*inputs, out",
    **facts: Any,
) -> list[Rule]:
    """Return rules of ops of which nothing is known but their batch, and what they compute."""
    return lines(targets, opaque, saves, computes=computes, **facts)


def _full_name(target: str) -> str:
    """Complete an op's name; one of a library stands with all three parts."""
    if target.count(".") == 2:
        return target
    return f"aten.{target}" if "." in target else f"aten.{target}.default"
