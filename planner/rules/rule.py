"""The type of a row of the table: an op's signature, its work, what it saves for the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from autopar.planner.cluster.cluster import Collective
from autopar.planner.graph.layouts import PARTIAL, Layout
from autopar.planner.graph.ops import Op
from autopar.planner.rules.shapes import ShapeFunction, opaque
from autopar.planner.rules.signature import UNIT, Case, Pattern, Signature, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProducts:
    """`batch` products of m × k by k × n, done `times` times in sequence.

    `left` and `right` are the op's inputs that are multiplied; "" is an intermediate result of the
    op.
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
        """The FLOPs of the products: two for each multiplication with its addition."""
        return 2 * self.batch * self.m * self.n * self.k * self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """What an op computes on one rank.

    `flops` and `backward_flops` do not count `products`. The backward of a product is one more
    product for each factor that needs a gradient. The op runs `steps` in sequence. Each has, beside
    its products, one element-wise kernel, or `unfused` kernels if no library fuses them. `kept` is
    the number of elements that are made only for the backward.
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
    """An op, and the sizes of its tensors on one rank."""

    op: Op

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of an operand or result."""


Computing = Callable[[OpSizes], Computation]


class OpKind(StrEnum):
    """The kind of an op: decides what the letters of its rule do not, such as its price."""

    OTHER = ""
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    LOOKUP = "look-up"  # rows of a table
    BAG = "bag"  # sums of rows of a table
    NORM = "norm"  # layer, group, instance or RMS norm
    BATCH_NORM = "batch norm"
    SOFTMAX = "softmax"
    DROPOUT = "dropout"
    EXPONENTIAL = "exponential"  # computes at least one exponential per element
    CROSS_ENTROPY = "cross entropy"
    CLASS_LOSS = "class loss"  # of given log-probabilities
    LOSS = "loss"
    SUM = "sum"
    MEAN = "mean"
    ADDITION = "addition"
    SUBTRACTION = "subtraction"
    NEGATION = "negation"  # the result is a number, or 0, minus the input
    MULTIPLICATION = "multiplication"
    DIVISION = "division"
    POWER = "power"
    QUOTIENT = "quotient"  # of integers, or the remainder
    COMPARISON = "comparison"  # of numbers
    CLAMP = "clamp"  # to a minimum
    RECURRENT = "recurrent"
    GROUPED = "grouped"  # products of groups of rows with one matrix each
    STRIDED = "strided"  # a view by strides in memory
    SLICES = "slices"  # each slice along a dim depends on all of its elements: renorm
    ALONG = "along"  # each result depends on other positions of a dim: cumsum, flip
    SORT = "sort"
    ARGSORT = "argsort"
    COUNT = "count"  # how often numbers occur
    VALUES = "values"  # distinct values
    PLACES = "places"  # of the elements that are not zero
    VIEW = "view"
    COPY = "copy"
    CAST = "cast"  # to another dtype or device, if needed
    CONTIGUOUS = "contiguous"  # a contiguous copy, if needed
    DIAGONAL = "diagonal"  # also triangles and the trace
    INDEX = "index"
    WRITE = "write"  # copies into a whole tensor
    WRITE_AT = "write at"  # writes values at indices
    ADD_AT = "add at"  # adds values at indices
    SCATTER = "scatter"  # a copy of a tensor in which a part is replaced
    FILL = "fill"  # with a plain number
    PART = "part"  # of a tensor
    PARTS = "parts"  # parts that tile a tensor
    JOIN = "join"  # of tensors that tile the result
    EXPAND = "expand"
    REPEAT = "repeat"
    RANGE = "range"
    NEW = "new"  # with a given shape, and the dtype of a tensor
    LIKE = "like"  # with the shape and dtype of a tensor
    GRADIENT = "gradient"  # as torch.autograd.grad computes it

    @property
    def is_class_loss(self) -> bool:
        """Whether the op is a loss over classes with one class per row."""
        return self in (OpKind.CROSS_ENTROPY, OpKind.CLASS_LOSS)

    @property
    def is_loss(self) -> bool:
        """Whether the op is a loss, with a reduction."""
        return self.is_class_loss or self is OpKind.LOSS

    @property
    def reads_table(self) -> bool:
        """Whether the op reads rows of a table."""
        return self in (OpKind.LOOKUP, OpKind.BAG)

    @property
    def keeps_entries(self) -> bool:
        """Whether the result has the elements of the first input, perhaps cast, each once."""
        return self in (OpKind.VIEW, OpKind.COPY, OpKind.CAST, OpKind.CONTIGUOUS)


class Traffic(StrEnum):
    """What an op moves through memory."""

    ALL = "all"  # reads its inputs, writes its results
    NONE = "none"  # a view
    GATHERED = "gathered"  # reads as much of a table as it writes
    BAGGED = "bagged"  # reads a row of a table for each index, and writes one for each bag


class Linear(StrEnum):
    """In which inputs an op is linear: a partial sum in these gives a partial sum as the result."""

    UNKNOWN = "unknown"  # the table does not say
    NO = "no"
    FIRST = "first"  # in the first input; the others only give an index, a shape or a dtype
    JOINTLY = "jointly"  # in all inputs together: a sum, a view, a concatenation
    EACH = "each"  # in each input if the others are whole: a product


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedForBackward:
    """A tensor saved for the backward: `what` is an argument, "out", or letters with a dtype."""

    what: str
    needs: str = ""  # it is saved if this argument needs a gradient; "": if any does
    dtype: str = ""  # for letters: the tensor's dtype; "": the result's
    only: str = ""  # it is saved under this condition: "fused", "unfused", "always"

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
class SplitForm:
    """How ranks run an op that sums over a letter, if it is split along that letter.

    If a rule has no form, ranks run the op itself. `letter` is one of the signature's `letters`.
    Ranks call the runtime's `function`; if that is empty, they run the op and multiply its result
    by their share of the letter. `gives` is the result's layout: P, or I if the function adds up
    the ranks' terms. `sends` lists the collectives in the function's forward, each with the number
    of fp32 values that a rank sends for a row: for all positions of the letter together.
    """

    letter: str
    function: str = ""
    gives: Layout = PARTIAL
    sends: tuple[tuple[Collective, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Facts about an op.

    The FLOPs of each group of letters in `contracts` are twice the product of their sizes; "*"
    stands for all letters of operands and results. If letters do not determine the FLOPs,
    `computes` does: the products of an LSTM, the FLOPs of a Cholesky factor. `saves` lists what the
    backward needs: `x if y` is the tensor argument x if the argument y needs a gradient, `out` is
    the result, `f32(a b)` is a tensor with that dtype over these letters, `own(computed)` are the
    computation's `kept` elements, in the dtype of the first input. `added` is the argument that is
    added to the op's linear part: a plain number there makes the op affine. `sizes` is the argument
    with the result's sizes; `cuts` are arguments with sizes or positions along the op's `dim`.
    If the op takes a part of a tensor, `written_by` is the op that makes a new tensor in which that
    part is replaced. `updates` are arguments that the op writes to, although its schema does not
    say so. torch requires the arguments `alike` to have one dtype ("*inputs": all tensors), and has
    no 16-bit kernel if `is_wide`. `names` proposes a name for the axis of a letter. Only a split
    along the letter of `split_form` changes how ranks run the op.
    """

    target: str
    shape: Pattern | ShapeFunction
    contracts: tuple[str, ...] = ()
    computes: Computing | None = None
    saves: tuple[SavedForBackward, ...] = ()
    kind: OpKind = OpKind.OTHER
    traffic: Traffic = Traffic.ALL
    linear: Linear = Linear.UNKNOWN
    added: str = "bias"
    sizes: str = ""
    cuts: tuple[str, ...] = ()
    written_by: str = ""
    updates: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    is_wide: bool = False
    is_elementwise: bool = False  # an element of the result depends on one element of each input
    permutes: bool = False  # a view whose dims are the input's in another order
    names: Mapping[str, str] = field(default_factory=dict)
    split_form: SplitForm | None = None

    @property
    def factors(self) -> tuple[str, ...]:
        """The arguments that a matrix product multiplies and saves; () for other ops."""
        return tuple(entry.what for entry in self.saves) if len(self.contracts) == 1 else ()

    def signature(self, case: Case) -> Signature:
        """Return the op's signature; if the rule does not fit the op's sizes, an opaque one."""
        read = self.shape.signature if isinstance(self.shape, Pattern) else self.shape
        try:
            found = read(case)
        except ValueError:
            return opaque(case)
        return found if found.fits(case) else opaque(case)

    def form_along(self, signature: Signature, letter: str) -> SplitForm | None:
        """Return the form of an op split along a letter; None if ranks run the op itself."""
        form = self.split_form
        summed = signature.letters.get(form.letter, UNIT) if form is not None else UNIT
        return form if any(leaf.name == letter for leaf in leaves(summed)) else None


_SWITCHES = ("train", "training")
_CHANCES = ("p", "dropout", "dropout_p")


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers: torch tags it as random, and it is not disabled."""
    if not _draws(op.target):
        return False
    arguments = dict(op.arguments)
    is_off = any(arguments.get(name) is False for name in _SWITCHES)
    return not is_off and all(arguments.get(name) != 0.0 for name in _CHANCES)


# The public ops of aten that torch marks as random, without the _ of in-place forms.
_DRAWING = (
    "alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout "
    "feature_dropout geometric gru log_normal lstm miopen_rnn multinomial native_dropout normal "
    "normal_functional poisson rand rand_like randint randint_like randn randn_like random "
    "randperm rnn_relu rnn_tanh rrelu rrelu_with_noise rrelu_with_noise_functional "
    "scaled_dot_product_attention uniform"
)
DRAWING = frozenset(_DRAWING.split())


@lru_cache(maxsize=4096)
def _draws(target: str) -> bool:
    """Whether torch marks an op as random. Only private ops and those of libraries need torch."""
    library, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    if library == "aten" and not name.startswith("_"):
        return name.removesuffix("_") in DRAWING
    import torch  # imported here, because it takes seconds

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
    """Return a rule for each op of a table row; `facts` are further columns, as in Rule."""
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
    """Return rules for ops of which only the batch dim and the FLOPs are known."""
    return lines(targets, opaque, saves, computes=computes, **facts)


def _full_name(target: str) -> str:
    """Complete an op's name to library.name.overload; other libraries' ops are named in full."""
    if target.count(".") == 2:
        return target
    return f"aten.{target}" if "." in target else f"aten.{target}.default"
