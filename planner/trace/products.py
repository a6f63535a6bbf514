"""Refuses types that torch does not compute with, which tensors without memory let pass."""

from __future__ import annotations

from autopar.planner.errors import TraceError
from autopar.planner.graph import MODEL_DTYPE, Graph, Op
from autopar.planner.precision import Precision

_PRODUCTS = frozenset(
    f"aten.{name}.default"
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
)
_NORMS = frozenset({"aten.layer_norm.default", "aten.group_norm.default"})
_WHOLE = ("int", "uint", "bool")
_OWN = "the model's own type"


class UnlikeTypesError(TraceError):
    """Operands whose element types PyTorch does not compute with together."""

    half_expected = (
        "one type: torch.rand, torch.arange(…).float() and .float() make float32, and so is what "
        "it is added to"
    )
    half_fix = "cast what is read there: x.to(self.weight.dtype)"

    def in_half(self, precision: Precision) -> TraceError:
        """Return the error of a model that trains well, but not in 16 bits."""
        return TraceError(
            f"in {precision}, {self.found}",
            where=self.where,
            expected=self.half_expected,
            fix=f"{self.half_fix}, or plan with --precision {Precision.FP32}",
        )


class NoKernelError(UnlikeTypesError):
    """An op that PyTorch does not compute in 16 bits."""

    half_expected = ""
    half_fix = "give it x.float(), and cast back what it makes"


def check_products(graph: Graph, *, is_half: bool) -> None:
    """Raise an error for the first product that PyTorch would not compute.

    In a training in 32 bits, floating types below float64 are one.
    """
    ops = _PRODUCTS | _NORMS if is_half else _PRODUCTS
    for op in graph.ops:
        if op.target in ops:
            _check(op, graph, odd_types=("float64", "float32") if is_half else ("float64",))


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _where(op: Op, graph: Graph) -> str:
    return f"{op.location}, in module {graph.calls[op.call].path or '(root)'}"


def _check(op: Op, graph: Graph, *, odd_types: tuple[str, ...]) -> None:
    types = list(dict.fromkeys(graph.tensors[name].dtype for name in op.inputs))
    odd = [one for one in types if one.startswith(_WHOLE) or one in odd_types]
    if not odd or len(types) == 1:
        return
    others = [one for one in types if one not in odd]
    told = [_OWN if one == MODEL_DTYPE else one for one in (odd[0], (others or odd[1:])[0])]
    raise UnlikeTypesError(
        f"{_name(op)} multiplies {told[0]} by {told[1]}",
        where=_where(op, graph),
        expected="operands of one type",
        fix="give float32 in example_batch, or cast what the product reads: x.to(weight.dtype)",
    )
