"""Says what every op of a graph computes, moves and keeps, at one batch and one precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType

from autopar.planner.axes.infer import Axes
from autopar.planner.axes.terms import leaves
from autopar.planner.graph import MODEL_DTYPE, Graph, Op, Origin, Parameter, Tensor, refs
from autopar.planner.rules.rule import Rule, Saved, Traffic
from autopar.planner.rules.signature import Signature
from autopar.planner.rules.table import rule_of


class Precision(StrEnum):
    """How the model's own floating type is held in training."""

    FP32 = "fp32"
    BF16 = "bf16"  # bf16 weights and activations, fp32 gradients, master weights and moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the device's kernels keep: flash attention always, one byte of dropout mask if fused."""

    fused_dropout: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one op, or a group of ops, does."""

    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What parameters occupy between steps, with AdamW."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """The work of every op at one batch and precision; a tensor kept twice counts at its first."""

    batch: int
    precision: Precision
    ops: Mapping[str, Work]

    def total(self, ops: Iterable[Op]) -> Work:
        """Return the work of some ops together."""
        return sum((self.ops[op.name] for op in ops), Work())


_ITEM_BYTES = {"bool": 1, "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "f32": 4,
               "i64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}  # fmt: skip


def item_bytes(dtype: str, precision: Precision) -> int:
    """Return the bytes of one element."""
    if dtype == MODEL_DTYPE:
        return 2 if precision is Precision.BF16 else 4
    return _ITEM_BYTES[dtype]


def state_of(parameters: Iterable[Parameter], precision: Precision) -> State:
    """Return what parameters, gradients and AdamW occupy.

    fp32: 4 bytes, 4 of gradient, 8 of moments. bf16: 2 bytes, 4 of fp32 gradient, 4 of master
    weight and 8 of moments. Frozen parameters have neither gradient nor optimizer state.
    """
    weights = gradients = optimizer = 0
    for parameter in parameters:
        count = prod(size.at(0) for size in parameter.shape)
        weights += count * item_bytes(parameter.dtype, precision)
        if parameter.trainable:
            gradients += 4 * count
            optimizer += (12 if precision is Precision.BF16 else 8) * count
    return State(parameter_bytes=weights, gradient_bytes=gradients, optimizer_bytes=optimizer)


def annotate(
    graph: Graph,
    axes: Axes,
    *,
    batch: int,
    precision: Precision,
    kernels: Kernels = Kernels(),
) -> Annotation:
    """Return the work of every op."""
    annotator = _Annotator(graph, axes, batch, precision, kernels)
    works = {op.name: annotator.work(op) for op in graph.ops}
    return Annotation(batch=batch, precision=precision, ops=MappingProxyType(works))


class _Annotator:
    def __init__(
        self, graph: Graph, axes: Axes, batch: int, precision: Precision, kernels: Kernels
    ) -> None:
        self.graph = graph
        self.axes = axes
        self.batch = graph.fixed_batch or batch
        self.precision = precision
        self.kernels = kernels
        self.kept: set[str] = set()
        self.same_memory: dict[str, str] = {}
        attended = {op.outputs[0] for op in graph.ops if op.target == _ATTENTION}
        for op in graph.ops:
            if self._takes_no_memory(op, attended):
                self.same_memory[op.outputs[0]] = op.inputs[0]

    def work(self, op: Op) -> Work:
        """Return the work of one op; tensors that it keeps are marked as kept."""
        rule = rule_of(op.target)
        signature = self.axes.ops[op.name].signature
        flops = self._flops(rule, signature)
        differentiable = any(self.graph.tensors[out].requires_grad for out in op.outputs)
        moved = 0 if op.outputs[0] in self.same_memory else self._moved(rule, op)
        saved = sum(self._saved(rule, signature, op)) if differentiable else 0
        return Work(
            forward_flops=flops,
            backward_flops=int(flops * self._backward_share(rule, op)) if differentiable else 0,
            forward_bytes=moved,
            backward_bytes=self._moved_backward(rule, op, moved) if differentiable else 0,
            saved_bytes=saved,
        )

    def _takes_no_memory(self, op: Op, attended: set[str]) -> bool:
        """Whether an op that the trace shows as a copy gives its input back on a device.

        Casts between equal types, dropout that drops nothing, and the reshape after attention:
        flash kernels lay their result out with the heads inside, so that joining them is a view.
        """
        if op.target.startswith(("aten.to.", "aten.type_as.")):
            return self._keeps_type(op)
        if op.target == "aten.dropout.default":
            return op.argument("p") == 0 or op.argument("train") is False
        if op.target in ("aten.reshape.default", "aten.contiguous.default"):
            return self.graph.tensors[op.inputs[0]].storage in attended
        return False

    def _keeps_type(self, op: Op) -> bool:
        before, after = self.graph.tensors[op.inputs[0]], self.graph.tensors[op.outputs[0]]
        kinds = {before.dtype, after.dtype}
        return kinds <= {MODEL_DTYPE, "float32"} and self.precision is Precision.FP32

    def _flops(self, rule: Rule, signature: Signature) -> int:
        """Two for each multiply and add: 2·∏ of the letters, for each group of the rule."""
        total = 0
        for group in rule.contracts:
            tokens = group.split()
            if tokens == ["*"]:
                found = {x for _, dims in signature.operands for d in dims for x in leaves(d)}
                total += 2 * prod(leaf.size.at(self.batch) for leaf in found)
            else:
                total += 2 * self._letters(tokens, signature)
        return total

    def _letters(self, tokens: list[str], signature: Signature) -> int:
        """Return the product of the sizes of some letters; h is k·g where key heads are fewer."""
        wanted = set(tokens) | ({"k", "g"} if "h" in tokens and "k" in signature.letters else set())
        sizes = [
            leaf.size.at(self.batch)
            for name, dim in signature.letters.items()
            if name in wanted or (name.startswith("…") and "…" in wanted)
            for leaf in leaves(dim)
        ]
        return prod(sizes)

    def _backward_share(self, rule: Rule, op: Op) -> float:
        """One product for each operand that needs a gradient; flash attention computes 5 for 2."""
        if len(rule.contracts) > 1:
            return 2.5
        return sum(self.graph.tensors[name].requires_grad for name in self._factors(op))

    def _factors(self, op: Op) -> tuple[str, ...]:
        """Return the two tensors that a contraction multiplies (not a bias)."""
        named = [n for key, value in op.arguments if key not in ("bias", "self") or
                 op.target in _SELF_IS_FACTOR for n in refs(value)]  # fmt: skip
        return tuple(named)

    def _bytes(self, tensor: Tensor) -> int:
        return tensor.numel.at(self.batch) * item_bytes(tensor.dtype, self.precision)

    def _moved(self, rule: Rule, op: Op) -> int:
        written = sum(self._bytes(self.graph.tensors[out]) for out in op.outputs)
        if rule.traffic is Traffic.NONE:
            tensors = self.graph.tensors
            copied = tensors[op.outputs[0]].storage == op.outputs[0]
            return 2 * written if copied and "reshape" in op.target else 0
        if rule.traffic is Traffic.GATHERED:
            return 2 * written
        return written + sum(self._bytes(self.graph.tensors[name]) for name in op.inputs)

    def _moved_backward(self, rule: Rule, op: Op, moved: int) -> int:
        """The gradient of each result is read, that of each input written, what was kept read."""
        if moved == 0:
            return 0
        grads = [self.graph.tensors[n] for n in op.inputs if self.graph.tensors[n].requires_grad]
        if rule.traffic is Traffic.GATHERED:
            return moved
        return moved + sum(map(self._bytes, grads))

    def _saved(self, rule: Rule, signature: Signature, op: Op) -> Iterator[int]:
        for entry in rule.saves:
            if not self._applies(entry, op):
                continue
            if entry.dtype:
                yield self._made(entry, signature, op)
            else:
                yield from self._tensors_kept(entry, op)

    def _applies(self, entry: Saved, op: Op) -> bool:
        if entry.only in ("fused", "unfused"):
            given = dict(op.arguments)
            active = given.get("train", given.get("training")) and given.get("p") != 0
            return bool(active) and self.kernels.fused_dropout == (entry.only == "fused")
        if not entry.needs:
            return True
        names = refs(dict(op.arguments).get(entry.needs))
        return any(self.graph.tensors[name].requires_grad for name in names)

    def _made(self, entry: Saved, signature: Signature, op: Op) -> int:
        out = self.graph.tensors[op.outputs[0]]
        own = self.graph.tensors[op.inputs[0]].dtype
        dtype = entry.dtype if entry.dtype in _ITEM_BYTES else own
        tokens = entry.what.split()
        count = out.numel.at(self.batch)
        if tokens != ["*"]:
            count = self._letters(tokens, signature)
        return count * item_bytes(dtype, self.precision)

    def _tensors_kept(self, entry: Saved, op: Op) -> Iterator[int]:
        if entry.what == "out":
            names: Iterable[str] = op.outputs
        elif entry.what == "*inputs":
            names = op.inputs
        else:
            names = refs(dict(op.arguments).get(entry.what))
        for name in names:
            root = self._memory(name)
            if root not in self.kept:
                self.kept.add(root)
                if self.graph.tensors[root].origin in (Origin.OP, Origin.INPUT):
                    yield self._bytes(self.graph.tensors[root])

    def _memory(self, name: str) -> str:
        root = self.graph.tensors[name].storage
        while root in self.same_memory:
            root = self.graph.tensors[self.same_memory[root]].storage
        return root


_ATTENTION = "aten.scaled_dot_product_attention.default"
_SELF_IS_FACTOR = frozenset({"aten.matmul.default", "aten.mm.default", "aten.bmm.default",
                             "aten.outer.default"})  # fmt: skip
