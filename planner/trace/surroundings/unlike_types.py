"""Refuses types that torch does not compute with, which tensors without memory let pass."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.errors import TraceError
from autopar.planner.findings.counting import is_class
from autopar.planner.graph import Graph
from autopar.planner.ops import MODEL_DTYPE, Op, Ref
from autopar.planner.precision import Precision
from autopar.planner.rules.table import kind_of, rule_of

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
    odd_types = ("float64", "float32") if is_half else ("float64",)
    for op in graph.ops:
        rule = rule_of(op.target)
        if rule.alike == ("*inputs",):
            _check_product(op, graph, odd_types)
        elif rule.alike:
            _check_pair(op, graph, odd_types)
            _check_classes(op, graph)
        elif is_half and rule.is_wide and graph.tensors[op.inputs[0]].dtype == MODEL_DTYPE:
            raise NoKernelError(
                f"torch does not compute {_name(op)}",
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
    arguments = dict(op.arguments)
    target = arguments.get("target")
    if kind_of(op).is_class_loss and isinstance(target, Ref) and not is_class(graph, target):
        return
    given = {key: arguments.get(key) for key in rule_of(op.target).alike}
    refs = {key: one.tensor for key, one in given.items() if isinstance(one, Ref)}
    types = [graph.tensors[name].dtype for name in refs.values()]
    if len(set(types)) == 2 and set(types) & set(odd_types):
        raise UnlikePairError(
            f"{_name(op)} computes in {_told(types[0])}, and its {[*refs][1]} is {_told(types[1])}",
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
