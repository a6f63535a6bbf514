"""Finds element types that do not match, and hides from the model that it is traced.

Buffers stay in fp32 beside 16-bit parameters. If the model adds a buffer to activations
(x + self.positions), these become fp32, and torch does not multiply fp32 by 16-bit weights. So some
buffers are cast to 16 bits, as few as possible; model.to(torch.bfloat16) would cast all.

gaussian_nll_loss checks a tensor's values, which a trace does not know; here the check is left out.

Libraries ask torch whether a graph is being made. If it is, they compute in another way than in
training: with their own masks instead of `is_causal`, or without a check. Therefore torch answers
no.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, _subclasses
from torch._subclasses import fake_tensor
from torch.nn import functional

from autopar.planner.errors import TraceError
from autopar.planner.findings.loss import is_class
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE, Op, Ref
from autopar.planner.precision import Precision
from autopar.planner.rules.table import kind_of, rule_of
from autopar.planner.trace.model_checks import TORCH

Names = frozenset[str]

_MOST_KINDS = 4  # with more kinds of buffers, only all of them together are tried


def traced_with_few(
    traced: Callable[[Names], Graph], wide: Callable[[], Mapping[str, Tensor]]
) -> Graph:
    """Return a trace in 16 bits that casts few buffers to 16 bits (`narrowed` buffers).

    `traced` raises UnlikeTypesError if types clash; `wide` returns the buffers that may be
    narrowed. A buffer that the forward writes to is narrowed only if types clash otherwise.
    """
    try:
        return traced(frozenset())
    except UnlikeTypesError as error:
        clash = error
    kinds = _kinds(name for name, buffer in wide().items() if buffer.dim())
    chosen, found = _first_that_fits(traced, kinds, clash)
    likely = promoting(found)
    written = frozenset(one.name for one in found.buffers if one.updated)
    unlikely = [kind for kind in kinds if kind.isdisjoint(likely)]
    doubtful = [kind for kind in kinds if kind not in unlikely and not kind.isdisjoint(written)]
    for left_out in (frozenset[str]().union(*unlikely), *doubtful):
        fewer = chosen - left_out
        if fewer and fewer != chosen:
            with suppress(UnlikeTypesError):
                found = traced(fewer)
                chosen = fewer
    return found


def promoting(graph: Graph) -> Names:
    """Return the narrowed buffers that would make types clash if they were in fp32.

    Types clash in an op whose operands must have one type. If the model itself casts a tensor to
    16 bits, this trace does not show the cast, so the result may have more buffers than necessary.
    """
    of = {b.name: frozenset({b.name}) for b in graph.buffers if b.narrowed}
    found: Names = frozenset()
    for op in graph.ops:
        given = [name for name in op.inputs if graph.tensors[name].dtype == MODEL_DTYPE]
        promoted = [of.get(name, frozenset()) for name in given]
        together = frozenset[str]().union(*promoted)
        if rule_of(op.target).alike and not all(promoted):
            found |= together
        for name in op.outputs:
            if together and graph.tensors[name].dtype == MODEL_DTYPE:
                of[name] = together
    return found


def _first_that_fits(
    traced: Callable[[Names], Graph], kinds: list[Names], clash: UnlikeTypesError
) -> tuple[Names, Graph]:
    """Return the first set of narrowed buffers that makes types fit, or raise the clash."""
    for number, chosen in enumerate(_choices(kinds)):
        try:
            return chosen, traced(chosen)
        except UnlikeTypesError as error:
            if number == 0 and (error.found, error.where) == (clash.found, clash.where):
                break  # buffers are not the reason
    raise clash


def _choices(kinds: list[Names]) -> Iterator[Names]:
    every = frozenset[str]().union(*kinds)
    if every:
        yield every
    if 1 < len(kinds) <= _MOST_KINDS:
        yield from (every - kind for kind in kinds)
        if len(kinds) > 2:
            yield from kinds


def _kinds(names: Iterable[str]) -> list[Names]:
    """Group the names that differ only in a layer's number."""
    kinds: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        parts = tuple("*" if part.isdecimal() else part for part in name.split("."))
        kinds.setdefault(parts, set()).add(name)
    return [frozenset(kind) for kind in kinds.values()]


_SIGNATURE = inspect.signature(functional.gaussian_nll_loss)


def unchecked(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Compute gaussian_nll_loss without its check of values; return None for other functions."""
    if func is not functional.gaussian_nll_loss:
        return None
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    return _gaussian(*given.args)


def _gaussian(
    mean: Tensor, target: Tensor, variance: Tensor | float, full: bool, eps: float, reduction: str
) -> Tensor:
    if isinstance(variance, (int, float)):
        variance = variance * torch.ones_like(mean)
    if variance.dim() < mean.dim():
        variance = variance.unsqueeze(-1)
    variance = variance.clone()
    with torch.no_grad():
        variance.clamp_(min=eps)
    loss = 0.5 * (torch.log(variance) + (mean - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    reduced = {"mean": loss.mean, "sum": loss.sum}.get(reduction)
    return loss if reduced is None else reduced()


@contextmanager
def trace_hidden() -> Iterator[None]:
    """Tell all code outside torch that nothing is compiled or exported, and tensors are real."""
    with ExitStack() as patches:
        for name in ("is_compiling", "is_exporting"):
            hidden = _hidden(getattr(torch.compiler, name))
            patches.enter_context(patch.object(torch.compiler, name, hidden))
        patches.callback(setattr, _subclasses, "__class__", _subclasses.__class__)
        _subclasses.__class__ = _Subclasses
        yield


class _Subclasses(ModuleType):
    """The module torch._subclasses; code outside torch gets another class as its FakeTensor."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802
        return fake_tensor.FakeTensor if _is_asked_by_torch() else _NoTensor


class _NoTensor:
    """A class without instances."""


def _hidden(truth: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: _is_asked_by_torch() and truth()


def _is_asked_by_torch() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(TORCH)


_INTEGER_TYPES = ("int", "uint", "bool")


class UnlikeTypesError(TraceError):
    """Operands have element types that PyTorch does not combine in one op."""

    half_expected = (
        "one type: torch.rand, torch.arange(…).float() and .float() make float32, and a sum with a "
        "float32 tensor is float32"
    )
    half_fix = "cast the wider operand: x.to(self.weight.dtype)"

    def in_half(self, precision: Precision) -> TraceError:
        """Return the error for a model that trains in fp32, but not in 16 bits."""
        return TraceError(
            f"in {precision}, {self.found}",
            where=self.where,
            expected=self.half_expected,
            fix=f"{self.half_fix}, or plan with --precision {Precision.FP32}",
        )


class UnlikePairError(UnlikeTypesError):
    """Two arguments have different element types, and PyTorch wants one."""

    half_expected = "both in one type: torch.tensor([0.5]), torch.ones and .float() make float32"
    half_fix = "cast one to the other's: weight.to(logits.dtype)"


class NoKernelError(UnlikeTypesError):
    """An op that PyTorch does not compute in 16 bits."""

    half_expected = ""
    half_fix = "give the op x.float(), and cast its result back"


def check_types(graph: Graph, *, is_half: bool) -> None:
    """Raise for the first op that PyTorch does not compute with the types of its arguments.

    In fp32 training, all floating-point types below float64 count as one type.
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
    odd = [one for one in types if one.startswith(_INTEGER_TYPES) or one in odd_types]
    if not odd or len(types) == 1:
        return
    others = [one for one in types if one not in odd]
    raise UnlikeTypesError(
        f"{_name(op)} multiplies {_type_text(odd[0])} by {_type_text((others or odd[1:])[0])}",
        where=_where(op, graph),
        expected="operands of one type",
        fix="give float32 in example_batch, or cast the operand: x.to(weight.dtype)",
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
            f"{_name(op)} computes in {_type_text(types[0])}, and its {[*refs][1]} is "
            f"{_type_text(types[1])}",
            where=_where(op, graph),
            expected="both in one type",
            fix=UnlikePairError.half_fix,
        )


def _check_classes(op: Op, graph: Graph) -> None:
    target = op.given("target")
    if kind_of(op).is_class_loss and isinstance(target, Ref) and is_class(graph, target):
        dtype = graph.tensors[target.tensor].dtype
        if dtype not in ("int64", "uint8"):
            raise UnlikeTypesError(
                f"{_name(op)} is given classes in {dtype}",
                where=_where(op, graph),
                expected="int64",
                fix="give int64 in example_batch, and in the dataset",
            )


def _type_text(dtype: str) -> str:
    return "the model's own type" if dtype == MODEL_DTYPE else dtype


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _where(op: Op, graph: Graph) -> str:
    call = graph.calls.get(op.call)  # None in the model file's loss
    return op.location if call is None else f"{op.location}, in module {call.path or '(root)'}"
