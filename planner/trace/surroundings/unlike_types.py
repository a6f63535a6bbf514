"""Refuses types that torch does not compute with, which tensors without memory let pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.planner.errors import TraceError
from autopar.planner.findings.counting import is_class
from autopar.planner.graph import MODEL_DTYPE, Graph, Op, Ref
from autopar.planner.precision import Precision
from autopar.planner.rules.table import kind_of

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
_NORMS = ("layer_norm", "group_norm")
_PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "cross_entropy_loss": ("self", "weight"),
        "nll_loss": ("self", "weight"),
        "nll_loss_nd": ("self", "weight"),
        "binary_cross_entropy": ("self", "target"),
        "index_add": ("self", "source"),
        "index_add_": ("self", "source"),
        "index_put": ("self", "values"),
        "index_put_": ("self", "values"),
        "grid_sampler": ("input", "grid"),
        "embedding_bag": ("weight", "per_sample_weights"),
    }
)
_WIDE = frozenset(
    {
        "linalg_qr", "linalg_svd", "linalg_svdvals", "linalg_eig", "linalg_eigh", "linalg_eigvalsh",
        "linalg_det", "linalg_cholesky", "linalg_cholesky_ex", "linalg_solve", "linalg_lu_factor",
        "linalg_solve_triangular", "linalg_lstsq", "cholesky", "cholesky_solve", "cdist", "pdist",
        "stft", "complex", "polar", "ctc_loss", "multi_margin_loss", "multilabel_margin_loss",
    }
)  # fmt: skip
_WHOLE = ("int", "uint", "bool")


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


class UnlikePairError(UnlikeTypesError):
    """Two arguments whose element types PyTorch wants to be one."""

    half_expected = "both in one type: torch.tensor([0.5]), torch.ones and .float() make float32"
    half_fix = "cast one to the other's: weight.to(logits.dtype)"


class NoKernelError(UnlikeTypesError):
    """An op that PyTorch does not compute in 16 bits."""

    half_expected = ""
    half_fix = "give it x.float(), and cast back what it makes"


def check_types(graph: Graph, *, is_half: bool) -> None:
    """Raise an error for the first op that PyTorch would not compute for the types it is given.

    In a training in 32 bits, floating types below float64 are one.
    """
    products = (*_PRODUCTS, *_NORMS) if is_half else _PRODUCTS
    odd_types = ("float64", "float32") if is_half else ("float64",)
    for op in graph.ops:
        name = _name(op)
        if name in products and op.target.endswith(".default"):
            _check_product(op, graph, odd_types)
        elif name in _PAIRS:
            _check_pair(op, graph, odd_types)
            _check_classes(op, graph)
        elif is_half and name in _WIDE and graph.tensors[op.inputs[0]].dtype == MODEL_DTYPE:
            raise NoKernelError(
                f"torch does not compute {name}",
                where=_where(op, graph),
                fix=NoKernelError.half_fix,
            )


def _check_product(op: Op, graph: Graph, odd_types: Sequence[str]) -> None:
    types = list(dict.fromkeys(graph.tensors[name].dtype for name in op.inputs))
    odd = [one for one in types if one.startswith(_WHOLE) or one in odd_types]
    if not odd or len(types) == 1:
        return
    others = [one for one in types if one not in odd]
    raise UnlikeTypesError(
        f"{_name(op)} multiplies {_told(odd[0])} by {_told((others or odd[1:])[0])}",
        where=_where(op, graph),
        expected="operands of one type",
        fix="give float32 in example_batch, or cast what the product reads: x.to(weight.dtype)",
    )


def _check_pair(op: Op, graph: Graph, odd_types: Sequence[str]) -> None:
    target, keys = dict(op.arguments).get("target"), _PAIRS[_name(op)]
    if kind_of(op).is_class_loss and isinstance(target, Ref) and not is_class(graph, target):
        return
    given = [one for one in map(op.argument, keys) if isinstance(one, Ref)]
    types = [graph.tensors[one.tensor].dtype for one in given]
    if len(set(types)) == 2 and set(types) & set(odd_types):
        raise UnlikePairError(
            f"{_name(op)} computes in {_told(types[0])}, and its {keys[1]} is {_told(types[1])}",
            where=_where(op, graph),
            expected="both in one type",
            fix=UnlikePairError.half_fix,
        )


def _check_classes(op: Op, graph: Graph) -> None:
    target = dict(op.arguments).get("target")
    if kind_of(op).is_class_loss and isinstance(target, Ref) and is_class(graph, target):
        dtype = graph.tensors[target.tensor].dtype
        if dtype not in ("int64", "uint8"):
            raise UnlikeTypesError(
                f"{_name(op)} is given classes in {dtype}",
                where=_where(op, graph),
                expected="int64",
                fix="give int64 in example_batch, and in the dataset",
            )


def _told(dtype: str) -> str:
    return "the model's own type" if dtype == MODEL_DTYPE else dtype


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _where(op: Op, graph: Graph) -> str:
    call = graph.calls.get(op.call)  # none in the model file's loss
    return op.location if call is None else f"{op.location}, in module {call.path or '(root)'}"
