"""Refuses matrix products of unlike element types, which tensors without memory let pass."""

from __future__ import annotations

from autopar.planner.errors import TraceError
from autopar.planner.graph import MODEL_DTYPE, Graph, Op

_PRODUCTS = frozenset(
    f"aten.{name}.default"
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
)
_WHOLE = ("int", "uint", "bool")
_OWN = "the model's own type"


def check_products(graph: Graph) -> None:
    """Raise a TraceError for the first product that PyTorch would not compute.

    Floating types below float64 may meet: autocast gives them one type.
    """
    for op in graph.ops:
        if op.target in _PRODUCTS:
            _check(op, graph)


def _check(op: Op, graph: Graph) -> None:
    types = list(dict.fromkeys(graph.tensors[name].dtype for name in op.inputs))
    odd = [one for one in types if one.startswith(_WHOLE) or one == "float64"]
    if not odd or len(types) == 1:
        return
    others = [one for one in types if one not in odd]
    path = graph.calls[op.call].path or "(root)"
    told = [_OWN if one == MODEL_DTYPE else one for one in (odd[0], (others or odd[1:])[0])]
    raise TraceError(
        f"{op.target.split('.')[1]} multiplies {told[0]} by {told[1]}",
        where=f"{op.location}, in module {path}",
        expected="operands of one type",
        fix="give float32 in example_batch, or cast what the product reads: x.to(weight.dtype)",
    )
