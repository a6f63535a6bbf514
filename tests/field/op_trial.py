"""Computes ops as they are printed, and in every layout that the planner has for them.

The ops and their arguments are the samples of torch's own tests, so nobody here chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.codegen.forward.ops.arguments import PrintedPlace
from autopar.codegen.forward.ops.special_ops import gives_many, printed
from autopar.codegen.text.expressions import Binding, rendered, text
from autopar.planner.axes.infer import infer_axes
from autopar.planner.errors import AutoparError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, OpLayout
from autopar.planner.graph.ops import Op, TensorOrigin
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import ModelFile
from autopar.planner.programs.layouts.edges import Conversions
from autopar.planner.programs.layouts.strategies import strategies
from autopar.planner.rules.rule import is_random
from autopar.planner.trace import trace
from tests.planner.programs.layouts.layout_interpreter import Interpreter, called

ROWS = 4
DEGREES = (2, 3)
_MOST_SAMPLES = 8
_LARGE = 1e100


class Kind(StrEnum):
    """What became of one sample of an op."""

    SAME = "same"
    REFUSED = "refused"
    RAISED = "raised"
    LATE = "out of time"
    PRINTED = "printed wrong"
    SPLIT = "split wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one sample, and where it went wrong."""

    kind: Kind
    detail: str = ""


class Calling(nn.Module):
    """Calls a function with the arguments of a sample: numbers are weights, all else is constant.

    The loss weighs all results differently, so that no two places can be exchanged unseen.
    """

    def __init__(self, function: Callable[..., Any], sample: Any) -> None:
        super().__init__()
        self.function = function
        given = (sample.input, sample.args, sample.kwargs)
        leaves, self.spec = pytree.tree_flatten(given)
        self.leaves: list[Any] = []
        for i, leaf in enumerate(leaves):
            name = f"given{i}"
            if not isinstance(leaf, Tensor):
                self.leaves.append((leaf, ""))
                continue
            self.leaves.append((None, name))
            if leaf.is_floating_point():
                setattr(self, name, nn.Parameter(leaf.detach().clone()))
            else:
                self.register_buffer(name, leaf.detach().clone())

    def forward(self, y: Tensor) -> Tensor:
        """Return the weighed sum of what is computed, times the mean of y."""
        leaves = [self._tensor(name) if name else leaf for leaf, name in self.leaves]
        value, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = pytree.tree_leaves(self.function(value, *args, **kwargs))
        total = y.new_zeros(())
        for one in found:
            if isinstance(one, Tensor) and one.is_floating_point():
                weights = torch.linspace(1, 2, one.numel(), device=one.device)
                total = total + (one * weights.reshape(one.shape)).sum()
        return (total * y).mean()

    def _tensor(self, name: str) -> Tensor:
        """Return a computed tensor: ops that write would write to a weight otherwise."""
        tensor: Tensor = getattr(self, name)
        return tensor * 1.5 if tensor.is_floating_point() else tensor


def database(part: str = "") -> Sequence[Any]:
    """Return the ops of torch's own tests whose names hold a part."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [info for info in op_db if part in info.name]


def findings(info: Any) -> Iterator[Finding]:
    """Yield what became of the samples of an op, and of its form that writes in place."""
    torch.manual_seed(0)
    try:
        samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))
    except Exception:  # of tensors that are made in no plain way
        return
    step = max(1, len(samples) // _MOST_SAMPLES)
    for function in _variants(info):
        for sample in samples[::step]:
            yield from _of_sample(function, sample)


def _variants(info: Any) -> Iterator[Callable[..., Any]]:
    yield info.op
    if info.inplace_variant is not None:
        yield lambda value, *args, **kwargs: info.inplace_variant(value.clone(), *args, **kwargs)


def _of_sample(function: Callable[..., Any], sample: Any) -> Iterator[Finding]:
    model = Calling(function, sample)
    try:
        model(torch.ones(ROWS, 1)).backward()
    except Exception:  # nothing that plain PyTorch trains
        return
    try:
        graph = trace(_file_of(function, sample))
    except AutoparError as error:
        yield Finding(kind=Kind.REFUSED, detail=str(error).split("\n")[0])
        return
    except Exception as error:  # which a user would see as a traceback
        yield Finding(kind=Kind.RAISED, detail=f"{type(error).__name__}: {error}")
        return
    values = _values(graph, model)
    if values is None:
        return
    wrong = [*(f"{op.target}: {fault}" for op in graph.ops if (fault := _misprinted(op, values)))]
    if wrong:
        yield Finding(kind=Kind.PRINTED, detail=wrong[0])
        return
    yield next(_missplit(graph, values), Finding(kind=Kind.SAME))


def _file_of(function: Callable[..., Any], sample: Any) -> ModelFile:
    return ModelFile(
        path=Path("op.py"),
        factory="build_model",
        arguments=(),
        build_model=lambda: Calling(function, sample),
        example_batch=lambda rows: {"y": torch.ones(rows, 1)},
        loss=None,
        build_dataset=None,
        build_optimizer=None,
        build_scheduler=None,
    )


def _values(graph: Graph, model: nn.Module) -> dict[str, Tensor] | None:
    """Return all tensors of a graph; None where sizes depend on values, or not all is known."""
    if any(one.values is None for one in graph.constants.values()):
        return None
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict[str, Tensor] = {}
    for name, tensor in graph.tensors.items():
        if tensor.origin is TensorOrigin.INPUT:
            found[name] = torch.ones(ROWS, 1)
        elif tensor.origin is TensorOrigin.CONSTANT:
            shape = [size.at(ROWS) for size in tensor.shape]
            found[name] = torch.tensor(graph.constants[name].values).reshape(shape)
        elif tensor.origin is not TensorOrigin.OP:
            found[name] = given[name].detach().clone()
    if any(map(is_random, graph.ops)):
        return None
    for op in graph.ops:
        results = _results(called(op, [found[name].clone() for name in op.inputs], ROWS))
        found.update(zip(op.outputs, results, strict=True))
        sizes = [[size.at(ROWS) for size in graph.tensors[name].shape] for name in op.outputs]
        if sizes != [list(result.shape) for result in results]:
            return None
    return found


def _results(found: Any) -> list[Tensor]:
    listed = found if isinstance(found, (tuple, list)) else [found]
    return [one for one in listed if isinstance(one, Tensor)]


def _misprinted(op: Op, values: Mapping[str, Tensor]) -> str:
    """Return how an op as printed differs from the op, "" where it does not."""
    given = [values[name].clone() for name in op.inputs]
    expected_given = [one.clone() for one in given]
    expected = _results(called(op, expected_given, ROWS))
    names = tuple(text(f"given[{i}]") for i in range(len(given)))
    place = PrintedPlace(
        inputs=names, training=text("True"), dtype=text("torch.float32"), device=None, sizes={}
    )
    line = ""
    try:
        line, _ = rendered(printed(op, place), _unnamed)
        scope = {"F": nn.functional, "torch": torch, "given": given}
        found = _results(eval(line, scope))
    except Exception as error:
        return f"{line}: {type(error).__name__}: {error}"
    shown = expected if gives_many(op) else expected[:1]
    pairs = [*zip(found, shown, strict=False), *zip(given, expected_given, strict=True)]
    is_same = len(found) == len(shown) and all(_is_same(*pair) for pair in pairs)
    return "" if is_same else line


def _unnamed(value: object) -> tuple[str, Binding]:
    raise ValueError(f"{value} has no name")


def _is_same(found: Tensor, expected: Tensor) -> bool:
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and torch.allclose(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    )


def _missplit(graph: Graph, values: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Yield the layouts of single ops in which ranks compute another loss, or other gradients."""
    tensors = graph.tensors.values()
    if any(tensor.dtype in ("float16", "bfloat16") for tensor in tensors):
        return  # of which ranks round other sums
    exact = {
        name: value.double() if value.is_floating_point() else value
        for name, value in values.items()
        if graph.tensors[name].origin is not TensorOrigin.OP
    }
    split = _Splitting(graph, exact)
    loss, gradients = split.computed("", None, 1)
    if not all((one.abs() < _LARGE).all() for one in (loss, *gradients.values())):
        return  # of infinities nothing can be told
    for op in graph.ops:
        for degree in DEGREES:
            for own in strategies(op, graph, split.axes, degree=degree, batch=ROWS)[1:]:
                if not split.allows(op, own):
                    continue
                fault = split.fault(op, own, degree, loss, gradients)
                if fault:
                    detail = f"{op.target} on {degree}: {own.needs} -> {own.gives}: {fault}"
                    yield Finding(kind=Kind.SPLIT, detail=detail)


class _Splitting:
    """A graph of which one op at a time is split over ranks, and all else is whole."""

    def __init__(self, graph: Graph, outside: Mapping[str, Tensor]) -> None:
        self.graph, self.outside = graph, outside
        self.axes = infer_axes(graph)
        self.layers = find_layers(graph, self.axes)
        self.conversions = Conversions(graph, self.axes, batch=ROWS)

    def computed(
        self, name: str, own: OpLayout | None, ranks: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the gradients of what is whole; every rank must have the same."""
        layouts = [
            [own if own is not None and op.name == name else _whole(op) for op in layer.ops]
            for layer in (self.layers.layers[one.layers[0]] for one in self.layers.classes)
        ]
        ranked = Interpreter(
            self.graph, self.axes, self.layers,
            layouts=layouts, outside=(), ranks=ranks, batch=ROWS,
        )  # fmt: skip
        leaves = {key: ranked.place(key, value) for key, value in self.outside.items()}
        losses = ranked.run()
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        found: dict[str, Tensor] = {}
        for key, own_leaves in leaves.items():
            grads = [leaf.grad.to_dense() for leaf in own_leaves if leaf.grad is not None]
            if grads and not all(
                torch.allclose(grad, grads[0], rtol=1e-9, equal_nan=True) for grad in grads
            ):
                raise ValueError(f"ranks have different gradients of {key}")
            found |= {key: grads[0]} if grads else {}
        if not all(torch.allclose(loss, losses[0], rtol=1e-9, equal_nan=True) for loss in losses):
            raise ValueError("ranks have different losses")
        return losses[0].detach(), found

    def allows(self, op: Op, own: OpLayout) -> bool:
        """Whether what is whole elsewhere may be turned into what an op has."""
        return all(
            self.conversions.allow(name, WHOLE, need)
            for name, need in zip(op.inputs, own.needs, strict=True)
        ) and all(
            self.conversions.allow(name, made, WHOLE)
            for name, made in zip(op.outputs, own.gives, strict=True)
        )

    def fault(
        self, op: Op, own: OpLayout, degree: int, loss: Tensor, gradients: Mapping[str, Tensor]
    ) -> str:
        """Return how ranks differ from one process, "" where they do not."""
        try:
            found, its = self.computed(op.name, own, degree)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not torch.allclose(found, loss, rtol=1e-9, atol=1e-9):
            return f"loss {found:.9g} instead of {loss:.9g}"
        for name, gradient in gradients.items():
            scale = float(gradient.abs().sum())
            if not torch.allclose(its[name], gradient, rtol=1e-7, atol=1e-9 * (1 + scale)):
                return f"gradient of {name}"
        return ""


def _whole(op: Op) -> OpLayout:
    needs, gives = (WHOLE,) * len(op.inputs), (WHOLE,) * len(op.outputs)
    return OpLayout(letter="", axis="", needs=needs, gives=gives)
