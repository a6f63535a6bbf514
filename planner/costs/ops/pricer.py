"""Turns the ops and conversions of a graph into seconds and bytes.

Seconds are those of the device. The host also takes time to dispatch ops. Whether that is hidden
behind the device is only known for a region of many ops, so the layer adds it (layer.py). A CPU
dispatches and computes in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import (
    FREE,
    ConversionCost,
    Converted,
    conversion_cost,
    numbers_seconds,
)
from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.kernels.rates import rates_of
from autopar.planner.costs.ops.case import LocalShapes, OpCase, OpSeconds, OpSplit
from autopar.planner.costs.ops.fusion import Fusing, Fusion, fused_seconds
from autopar.planner.costs.ops.kept import (
    KeptTensors,
    SharedFindings,
    made_by,
    names_kept,
    summed_gradients,
)
from autopar.planner.costs.ops.measurements import (
    Host,
    Measurements,
    OpCost,
    OpKey,
    op_key,
    read_host,
)
from autopar.planner.costs.ops.seconds import op_seconds
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, Conversion, Layout, conversion
from autopar.planner.graph.ops import Op, Parameter, TensorOrigin
from autopar.planner.layers import (
    Compile,
    Layers,
    Residence,
    compiled_ops,
    find_layers,
    float8_linears,
    products_beside,
    residence,
)
from autopar.planner.precision import Float8, Kernels, Precision, item_bytes
from autopar.planner.rules.table import rule_of


class OpPricer:
    """Prices the ops, tensors and conversions of a graph at one batch, precision and device.

    `layers` are found if not passed. Pricers of one graph may share `alike`. `float8` says how
    linear layers multiply.
    """

    stops_early = True  # a layer's recomputation stops at the last tensor that the backward needs
    fuses_gradients = False  # products add gradients of weights to fp32 sums, as Megatron's do

    def __init__(
        self,
        graph: Graph,
        axes: GraphAxes,
        *,
        batch: int,
        precision: Precision,
        device: Device,
        measured: Measurements | None = None,
        layers: Layers | None = None,
        compile_: Compile = Compile.NONE,
        float8: Float8 = Float8.NONE,
        alike: SharedFindings | None = None,
    ) -> None:
        self.graph = graph
        self.axes = axes
        self.compile, self.float8 = compile_, float8
        self.batch = graph.fixed_batch or batch
        self.precision = precision
        self.device = device
        self.rates = rates_of(device, precision, float8)
        self._alike = alike or SharedFindings()
        self.sizes = self._alike.sizes_of(graph, axes, batch=self.batch, precision=precision)
        self.memory = self.sizes.memory
        self.kernels = Kernels(fused_dropout=not self.rates.is_cpu)
        self._measured = measured
        self._layers = layers
        self._costs: dict[tuple[str, OpSplit | None], OpCost] = {}
        self._kept: dict[str, KeptTensors] = {}
        self._conversions: dict[tuple[Converted, bool, int, GroupShape], ConversionCost] = {}

    @cached_property
    def host(self) -> Host:
        """The time to dispatch an op, measured if possible."""
        usual = read_host(self.device.architecture)
        times = self._measured.host(self.device.name) if self._measured else None
        if times is None:
            return usual
        return replace(
            usual,
            forward_seconds=times.forward_seconds,
            backward_seconds=times.backward_seconds,
            is_measured=True,
        )

    @cached_property
    def residence(self) -> Residence:
        """The layers that make and use each tensor."""
        return residence(self.graph, self.layers)

    @cached_property
    def layers(self) -> Layers:
        """The layers of the graph."""
        return self._layers or find_layers(self.graph, self.axes)

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters of the graph by name."""
        return {parameter.name: parameter for parameter in self.graph.parameters}

    @cached_property
    def later_users(self) -> Mapping[str, frozenset[int]]:
        """The layers that use each tensor that owns memory, except the layer that makes it."""
        found: dict[str, frozenset[int]] = {}
        for name, users in self.residence.users.items():
            root = self.memory.root(name)
            others = users - {self.residence.maker.get(root, -1)}
            found[root] = found.get(root, frozenset()) | others
        return found

    @cached_property
    def fusion(self) -> Fusion:
        """How torch.compile fuses ops of the layers that it compiles."""
        if not self.compile.takes_layers:
            return Fusion()
        key, known = self.kernels, self._alike.fusings
        if key not in known:
            taken = (compiled_ops(one, self.graph) for one in self.layers.layers)
            root, kept = self.memory.root, self._kept_uncompiled
            known[key] = Fusing(self.graph, taken, root=root, kept=kept)
        return known[key].at(lambda name: self.sizes.tensor_bytes(name, WHOLE, 1))

    @cached_property
    def float8_ops(self) -> Mapping[str, bool]:
        """The products in float8, and whether each is the first of its layer to cast its input."""
        if not self.compile.takes_layers or self.float8 is Float8.NONE:
            return {}
        linears, found = float8_linears(self.graph, self.layers, self.float8), dict[str, bool]()
        for layer in self.layers.layers:
            cast = set[str]()
            for op in (op for op in layer.ops if op.name in linears):
                source = self.memory.root(op.inputs[0])
                found[op.name] = source not in cast
                cast.add(source)
        return found

    def float8_bytes(self, op: Op, split: OpSplit | None) -> int:
        """Return the memory of a product's factors in float8 while its backward runs.

        There are two copies of the result's gradient, one of input and weight, and their scales.
        """
        if op.name not in self.float8_ops:
            return 0
        shapes = self.shapes(op, split)
        if self._scales(op, shapes) is Float8.NONE:
            return 0
        elements = 2 * shapes.numel(op.outputs[0]) + sum(map(shapes.numel, op.inputs[:2]))
        return round(elements * (1 + self.float8.scale_bytes))

    def launches(self, op: Op) -> tuple[int, int]:
        """Return the number of ops that the host dispatches for this one, forward and backward."""
        if op.name in self.fusion.views:
            return 0, 0
        if op.name in self.fusion.ops:
            return self.fusion.ops[op.name].launches
        return 1, int(self.graph.learns(op))

    def shapes(self, op: Op, split: OpSplit | None = None) -> LocalShapes:
        """Return the sizes of an op on one rank."""
        return self.sizes.shapes(op, split)

    def cost(self, op: Op, split: OpSplit | None = None) -> OpCost:
        """Return the time of an op on the device: measured if possible, else by formula."""
        key = op.name, split
        if key not in self._costs:
            self._costs[key] = self._cost(op, split)
        return self._costs[key]

    def inside_seconds(
        self, op: Op, split: OpSplit | None, shape: GroupShape, *, chunks: int = 1
    ) -> float:
        """Return the seconds of the collectives that a split op calls in its own forward.

        `split_form` in the op's rule lists them. If the op runs in chunks of rows, these are the
        seconds of one chunk.
        """
        form = rule_of(op.target).split_form
        if split is None or form is None or not form.sends:
            return 0.0
        shapes = self.shapes(op, split)
        if shapes.form is None:
            return 0.0
        rows = shapes.numel(op.inputs[0]) // max(1, chunks * shapes.letters((form.letter,)))
        return numbers_seconds(form.sends, rows, shape)

    def key(self, op: Op, split: OpSplit | None = None) -> OpKey:
        """Return an op's key in a profile."""
        return op_key(op, self.shapes(op, split), device=self.device.name, precision=self.precision)

    def kept(self, op: Op) -> KeptTensors:
        """Return the tensors that an op keeps for its backward."""
        if op.name not in self._kept:
            made = made_by(op, graph=self.graph, precision=self.precision, kernels=self.kernels)
            self._kept[op.name] = KeptTensors(
                names=self._names_kept(op), made=made, shapes=partial(self.shapes, op)
            )
        return self._kept[op.name]

    def _names_kept(self, op: Op) -> tuple[str, ...]:
        """Return the operands and results that an op keeps."""
        saved = self.fusion.saved
        return saved[op.name] if op.name in saved else self._kept_uncompiled(op)

    def _kept_uncompiled(self, op: Op) -> tuple[str, ...]:
        """Return the operands and results that an op keeps if it is not compiled."""
        key, known = (op.name, self.kernels), self._alike.uncompiled
        if key not in known:
            names = names_kept(op, graph=self.graph, kernels=self.kernels)
            known[key] = tuple(dict.fromkeys(filter(self._is_activation, names)))
        return known[key]

    def is_kept(self, root: str) -> bool:
        """Whether an op of any layer keeps this memory, without recomputation."""
        return root in self._all_kept

    def elements(self, name: str, layout: Layout, degree: int) -> int:
        """Return the elements of a tensor on one rank."""
        return self.sizes.elements(name, layout, degree)

    def tensor_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes of a tensor on one rank."""
        return self.sizes.tensor_bytes(name, layout, degree)

    def memory_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes on one rank of the memory that a tensor lies in."""
        return self.sizes.memory_bytes(name, layout, degree)

    def conversion(
        self, tensor: str, produced: Layout, needed: Layout, *, degree: int, shape: GroupShape
    ) -> ConversionCost:
        """Return the time of a tensor's conversion, and the part of it that collectives take."""
        step = conversion(produced, needed)
        if step is None or degree == 1:
            return FREE
        converted = Converted(
            step=step,
            produced_bytes=self.tensor_bytes(tensor, produced, degree),
            needed_bytes=self.tensor_bytes(tensor, needed, degree),
            is_contiguous=all(self.sizes.is_one_piece(tensor, one) for one in (produced, needed)),
            beside_seconds=self._beside_seconds(tensor, step, (produced, needed), degree),
        )
        key = converted, self.graph.tensors[tensor].requires_grad, degree, shape
        if key not in self._conversions:
            self._conversions[key] = conversion_cost(
                converted, degree=degree, shape=shape, rates=self.rates.own, has_gradient=key[1]
            )
        return self._conversions[key]

    def _beside_seconds(
        self, tensor: str, step: Conversion, ends: tuple[Layout, Layout], degree: int
    ) -> tuple[float, float]:
        """Return the seconds on a rank of the products that fuse with a tensor's messages.

        Ranks share a product evenly. Messages of uneven parts, or of the last dim, are not fused.
        """
        part, whole = sorted(self.elements(tensor, one, degree) for one in ends)
        is_last = any(one.dim == len(self.graph.tensors[tensor].shape) - 1 for one in ends)
        if not self.compile.fuses_messages or part * degree != whole or is_last:
            return 0.0, 0.0
        found = products_beside(self.graph, tensor, step, self.fusion.saved)
        forward, backward = ([self.cost(op) for op in ops] for ops in found)
        again = sum(one.backward_seconds - one.weight_gradient_seconds for one in backward)
        return sum(one.forward_seconds for one in forward) / degree, again / degree

    def conversion_seconds(
        self, tensor: str, produced: Layout, needed: Layout, degree: int, shape: GroupShape
    ) -> tuple[float, float]:
        """Return the seconds of a tensor's conversion, forward and backward."""
        cost = self.conversion(tensor, produced, needed, degree=degree, shape=shape)
        return cost.forward_seconds, cost.backward_seconds

    def _cost(self, op: Op, split: OpSplit | None) -> OpCost:
        seconds = self._formula(op, split)
        timing = None
        if self._measured and not {op.name}.intersection(self.fusion.ops, self.float8_ops):
            timing = self._measured.seconds(self.key(op, split))
        backward = seconds.input_gradient + seconds.weight_gradient
        summed = self._gradient_sums(op, split)
        if timing is None:
            return OpCost(
                forward_seconds=seconds.forward,
                backward_seconds=backward + summed,
                weight_gradient_seconds=seconds.weight_gradient,
                measured=False,
            )
        weight_share = seconds.weight_gradient / (backward or 1.0)  # measured as by formula
        return OpCost(
            forward_seconds=timing.forward_seconds,
            backward_seconds=timing.backward_seconds + summed,
            weight_gradient_seconds=timing.backward_seconds * weight_share,
            measured=True,
        )

    def _formula(self, op: Op, split: OpSplit | None) -> OpSeconds:
        if self.memory.takes_none(op) or self._is_passed_over(op):
            return OpSeconds(forward=0.0)
        shapes = self.shapes(op, split)
        case = OpCase(
            op=op,
            graph=self.graph,
            rule=rule_of(op.target),
            shapes=shapes,
            rates=self.rates,
            precision=self.precision,
            fuses_gradients=self.fuses_gradients,
            pads=op.name in self.fusion.saved,
            float8=self._scales(op, shapes),
            casts_input=self.float8_ops.get(op.name, False),
        )
        if op.name in self.fusion.ops:
            return fused_seconds(case, self.fusion.ops[op.name])
        seconds = op_seconds(case)
        return seconds if self.graph.learns(op) else OpSeconds(forward=seconds.forward)

    def _scales(self, op: Op, shapes: LocalShapes) -> Float8:
        """Return how an op scales its factors for float8; NONE if it does not use float8.

        A linear layer does not use it if the sizes of its shard are unsuitable, or if its bias can
        only be added to the sum of all shards' results.
        """
        if op.name not in self.float8_ops:
            return Float8.NONE
        rows, depth = shapes.shape(op.inputs[1])
        is_partial = depth < self.graph.tensors[op.inputs[1]].shape[1].at(self.batch)
        fits = rows % self.float8.multiple == depth % self.float8.multiple == 0
        return self.float8 if fits and not (is_partial and op.inputs[2:]) else Float8.NONE

    def _is_passed_over(self, op: Op) -> bool:
        """Whether an op is a view that only fused ops read: they write its gradient in place."""
        fusion, readers = self.fusion, self.graph.index.readers
        return op.name in fusion.views and all(
            one.name in fusion.ops or self._is_passed_over(one)
            for name in op.outputs
            for one in readers[name]
        )

    def _is_activation(self, name: str) -> bool:
        origin = self.graph.tensors[self.memory.root(name)].origin
        return origin in (TensorOrigin.OP, TensorOrigin.INPUT)

    @cached_property
    def _all_kept(self) -> frozenset[str]:
        return frozenset(self.memory.root(x) for op in self.graph.ops for x in self._names_kept(op))

    @cached_property
    def _summed(self) -> frozenset[tuple[str, str]]:
        return summed_gradients(self.graph)

    def _gradient_sums(self, op: Op, split: OpSplit | None) -> float:
        """Return the seconds to add gradients of tensors with several uses: 2 reads and a write."""
        fused = self.fusion.ops.get(op.name)
        read = op.inputs if fused is None else fused.reads  # others are summed inside the kernel
        names = [name for name in read if (op.name, name) in self._summed]
        if not names or op.name in self.fusion.views:
            return 0.0
        shapes = self.shapes(op, split)
        # in compiled layers a kernel that runs anyway adds the gradient: one more read
        passes = 1 if op.name in self.fusion.saved else 3
        return sum(
            memory_seconds(
                passes * shapes.numel(name)
                * item_bytes(self.graph.tensors[name].dtype, self.precision),
                rates=self.rates.own,
            )
            for name in names
        )  # fmt: skip
