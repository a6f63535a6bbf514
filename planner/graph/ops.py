"""The parts of a graph as immutable data: tensors, ops, module calls, parameters, sizes.

Names are unique strings. A tensor is made by one op, or is a parameter, a buffer, a constant or an
input. Sizes may depend on the batch size B. `MODEL_DTYPE` stands for the floating dtype of the
model, which a plan's precision replaces; a tensor that the model's code casts to float32 is
"float32".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering
from itertools import zip_longest
from math import prod

from autopar.planner.errors import InputError, SourceSpan


@total_ordering
@dataclass(frozen=True, slots=True)
class Extent:
    """A size c₀ + c₁·B + c₂·B² + …, where B is the batch size; the last coefficient is not zero."""

    coefficients: tuple[int, ...]

    @staticmethod
    def of(*coefficients: int) -> Extent:
        """Return the extent with these coefficients, lowest power first."""
        end = len(coefficients)
        while end and coefficients[end - 1] == 0:
            end -= 1
        return Extent(coefficients[:end])

    @property
    def is_constant(self) -> bool:
        """Whether the size is the same for every batch."""
        return len(self.coefficients) <= 1

    def at(self, batch: int) -> int:
        """Return the size for one batch."""
        if self.is_constant:  # the most common case
            return self.coefficients[0] if self.coefficients else 0
        return sum(c * batch**power for power, c in enumerate(self.coefficients))

    def __add__(self, other: Extent) -> Extent:
        return Extent.of(*map(sum, zip_longest(self.coefficients, other.coefficients, fillvalue=0)))

    def __sub__(self, other: Extent) -> Extent:
        return self + other * Extent.of(-1)

    def __mul__(self, other: Extent) -> Extent:
        if self.is_constant and other.is_constant:
            return Extent.of(self.at(0) * other.at(0))
        product = [0] * (len(self.coefficients) + len(other.coefficients))
        for i, a in enumerate(self.coefficients):
            for j, b in enumerate(other.coefficients):
                product[i + j] += a * b
        return Extent.of(*product)

    def divided_by(self, divisor: Extent) -> Extent | None:
        """Return the exact quotient, or None where there is none with integer coefficients."""
        rest, quotient = list(self.coefficients), [0] * len(self.coefficients)
        lead = len(divisor.coefficients) - 1
        if lead < 0:
            return None
        for power in range(len(rest) - 1, lead - 1, -1):
            factor, remainder = divmod(rest[power], divisor.coefficients[lead])
            if remainder:
                return None
            quotient[power - lead] = factor
            for k, c in enumerate(divisor.coefficients):
                rest[power - lead + k] -= factor * c
        return None if any(rest) else Extent.of(*quotient)

    def __lt__(self, other: Extent) -> bool:
        """Compare for large batches: the higher power decides."""
        pairs = [*zip_longest(self.coefficients, other.coefficients, fillvalue=0)][::-1]
        return [own for own, _ in pairs] < [its for _, its in pairs]

    def __str__(self) -> str:
        terms = [_term(c, power) for power, c in enumerate(self.coefficients) if c]
        return " + ".join(reversed(terms)) or "0"


ONE = Extent((1,))
BATCH = Extent((0, 1))


def constant(size: int) -> Extent:
    """Return the extent that is `size` for every batch."""
    return Extent.of(size)


def numel(shape: tuple[Extent, ...]) -> Extent:
    """Return the number of elements of a tensor."""
    if all(size.is_constant for size in shape):
        return constant(prod(size.at(0) for size in shape))
    return prod(shape, start=ONE)


def _term(coefficient: int, power: int) -> str:
    batch = {0: "", 1: "B"}.get(power, f"B^{power}")
    if not batch:
        return str(coefficient)
    return batch if coefficient == 1 else f"{coefficient}·{batch}"


MODEL_DTYPE = "model"
LOSS_CALL = "(loss)"  # the call of the ops in the loss function, which is not a module
MODULE = "module "  # comes before the path of a module that is an argument
# the largest numbers of float64 and bfloat16, the dtypes of traces (torch.finfo(x.dtype).max)
MODEL_EXTREMES = (1.7976931348623157e308, 3.3895313892515355e38)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an argument."""

    tensor: str


@dataclass(frozen=True, slots=True)
class DType:
    """An element type as an argument, MODEL_DTYPE included."""

    name: str


Value = Ref | DType | Extent | str | bool | int | float | complex | None | tuple["Value", ...]


class Listed(tuple[Value, ...]):
    """A list among the arguments or in the result of a call; other sequences are tuples."""

    __slots__ = ()


class Mapped(tuple[Value, ...]):
    """A plain dict among the arguments or in the result of a call, as pairs of key and value."""

    __slots__ = ()


class Fields(tuple[Value, ...]):
    """An object among the arguments or in the result of a call, as pairs of name and value.

    Examples are a dataclass, and the outputs of a library's model.
    """

    __slots__ = ()


class NamedFields(Fields):
    """A namedtuple among the arguments or in the result of a call, as pairs of name and value."""

    __slots__ = ()


class TensorOrigin(StrEnum):
    """The origin of a tensor."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    GRADIENT = "gradient"  # what a backward of the model's own is given
    OP = "op"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value of the graph; `storage` is the tensor that owns its memory.

    If its size depends on data (`x[mask]`), its shape is the largest possible one, and `counted_by`
    is the mask that selects its elements; without a mask, it is the first op with such a result.
    Prices assume that a fraction `expected` of the largest number of elements is there: an equal
    part for each of several masks that share out the rows, as in a loop over experts, else 1.
    """

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    storage: str
    origin: TensorOrigin
    requires_grad: bool
    counted_by: str = ""
    expected: float = 1.0

    @property
    def numel(self) -> Extent:
        """The number of elements, or the largest possible number."""
        return numel(self.shape)

    def expected_numel(self, batch: int) -> int:
        """Return the number of elements that prices assume."""
        return round(prod(size.at(batch) for size in self.shape) * self.expected)

    @property
    def is_whole_numbered(self) -> bool:
        """Whether the elements are integers or booleans."""
        return self.dtype.startswith(("int", "uint", "bool"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter with every name in the model; tied weights are one parameter."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[Extent, ...]
    dtype: str
    trainable: bool
    moments: float = 2.0  # fp32 numbers that the optimizer keeps per element; 2 for AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer of the model; `updated` if the forward writes to it (running statistics).

    `narrowed`: a 16-bit plan holds it in 16 bits, although the model was built with fp32.
    """

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    persistent: bool
    updated: bool
    narrowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor made from plain numbers in the forward; `values` has them, None if they are many."""

    name: str
    values: Value


class StateChange(StrEnum):
    """Whether a call of a module changes Python state: an attribute, a list or a global."""

    NOTHING = ""
    BEHIND = "behind"  # the change remains after the step
    FOR_A_WHILE = "for a while"  # other code undoes the change in the same step


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """A call of a module: `key` is unique, `path` is the module's, the same for all its calls.

    `is_function` marks a custom autograd.Function: the graph has its forward but not the backward
    that it defines, so scripts call the Function instead of printing its code. Arguments that are
    neither tensors nor plain values are text such as "<DynamicCache>"; the model's modules are
    "<module h.0.position>". Lists are `Listed`, because callers concatenate them; dicts are
    `Mapped`, and objects with fields `Fields`. `has_unused` marks a call that computes, from
    activations, something that the loss does not need. `is_batch_norm` marks torch's batch norms,
    which share statistics over data ranks. `left` says whether the call changes Python state.
    `mode_is_set` marks a call before which other code set the module to training or evaluation.
    `spans` are the expressions that call it: the innermost one first, the one in a forward last.
    """

    key: str
    path: str
    class_name: str
    is_function: bool
    parent: str | None
    arguments: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]
    result: Value
    has_unused: bool = False
    is_batch_norm: bool = False
    left: StateChange = StateChange.NOTHING
    mode_is_set: bool = False
    spans: tuple[SourceSpan, ...] = ()


LOSS_FUNCTION = ("", "loss")  # module and name of the model file's own loss function


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call of a plain function in the model's code, such as `rotate(x, cos, sin)`.

    The function is imported as `name` from `module`; `call` is the module call that runs it, `ops`
    are the names of its ops. Arguments, result and spans are as in a ModuleCall.
    """

    module: str
    name: str
    call: str
    arguments: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]
    result: Value
    ops: tuple[str, ...]
    spans: tuple[SourceSpan, ...] = ()


class GradientUse(StrEnum):
    """How the code of a model uses gradients itself."""

    CHANGED = "changed"  # by a hook
    TAKEN = "taken"  # by torch.autograd.grad
    KEPT = "kept"  # by retain_grad, for code that reads `.grad`


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGradient:
    """A place where a model uses gradients; code that changes or takes them cannot be printed.

    `call` is the module call, or LOSS_CALL in the loss function. `how` names the function of torch,
    `where` is the line, or the module of a hook. `is_read`: a trace shows what a hook computes.
    """

    call: str
    use: GradientUse
    how: str
    where: str
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation, its arguments by schema name, and the module call that ran it.

    `spans` are the expressions of the model that run it: the innermost one first, then the calls
    that lead to it, the one in a forward last.
    """

    name: str
    target: str
    arguments: tuple[tuple[str, Value], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: str
    grad_enabled: bool
    writes: tuple[str, ...] = ()
    spans: tuple[SourceSpan, ...] = ()

    @property
    def location(self) -> str:
        """The line of the model that runs the op, as `file:line`, or "" if there is none."""
        return str(self.spans[0]) if self.spans else ""

    def argument(self, name: str) -> Value:
        """Return an argument by its schema name."""
        for key, value in self.arguments:
            if key == name:
                return value
        raise InputError(
            f"{self.target} ({self.name}) has no argument {name!r} in the plan",
            fix="plan again with `autopar plan`",
        )

    def given(self, *names: str) -> Value:
        """Return the first of these arguments that the op has, or None."""
        return next((value for key, value in self.arguments if key in names), None)

    def number(self, name: str, default: int = 0) -> int:
        """Return an integer argument, or the default if the op has none."""
        value = self.given(name)
        return value if isinstance(value, int) else default

    def tensors(self, *names: str) -> tuple[str, ...]:
        """Return the tensors in the first of these arguments that the op has."""
        return tuple(refs(self.given(*names)))

    def tensor(self, *names: str) -> str:
        """Return the first tensor in the first of these arguments that the op has, or ""."""
        return next(iter(self.tensors(*names)), "")


def refs(value: Value) -> Iterator[str]:
    """Yield the names of the tensors in an argument, in order."""
    if isinstance(value, Ref):
        yield value.tensor
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


def objects(value: Value) -> Iterator[str]:
    """Yield the objects in an argument, also inside containers; tensors and numbers do not count.

    An object is named by its class, a module by `MODULE` and its path.
    """
    if isinstance(value, str) and value.startswith("<"):
        yield value[1:-1]
    elif isinstance(value, tuple):
        for item in value:
            yield from objects(item)


def size(value: Value) -> Extent:
    """Return the size in an argument as an extent; a size of −1, as in views, stays −1."""
    if isinstance(value, Extent):
        return value
    assert isinstance(value, int)
    return Extent.of(value)
