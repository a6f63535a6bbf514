"""Prices the layers of a model on a cluster, on demand, and caches the prices.

The cost of a layer depends on the tensor degree, the microbatch, the layout solution and the
devices of its stage. Equal layers under equal circumstances share one price.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planner.annotate import op_flops
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Cluster, Device
from autopar.planner.cluster.shape import (
    GroupShape,
    Kind,
    RowShare,
    group_shape,
    half_peak,
    node_orders,
)
from autopar.planner.costs.layers.flow import UNSHARED, SharedWeights
from autopar.planner.costs.layers.layer import layer_costs
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute
from autopar.planner.costs.steps.framework import read_framework_constants
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import OpLayout
from autopar.planner.layers import Compile, Layer, Layers, Residence, residence
from autopar.planner.plan.declared.constraints import HostSaving
from autopar.planner.plan.solving.prices import LayerKey, LayoutKey, LayoutPrices, Prices
from autopar.planner.precision import GRADIENT_BYTES, Float8, Precision
from autopar.planner.programs.layouts.building import LayoutFrame, LayoutInput, frame_of
from autopar.planner.programs.layouts.choice import (
    Budget,
    LayoutProgram,
    LayoutSolution,
    LinePrice,
)
from autopar.planner.programs.layouts.edges import Structure, structure_of
from autopar.planner.programs.layouts.rules import LayoutRules, own_layouts
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport

# A 16-bit weight has 2 bytes; with its gradient (4) and optimizer states (12), 9 times as many.
_STATE_FACTOR = 9.0
_BUDGET = Budget(points=4, weight_factor=_STATE_FACTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSubject:
    """A traced model, as the search sees it."""

    graph: Graph
    axes: GraphAxes
    layers: Layers


_Setting = tuple[int, int, Compile]  # tensor degree, microbatch, what is compiled


class PriceBook:
    """The prices of a model's layers."""

    def __init__(
        self,
        subject: SearchSubject,
        cluster: Cluster,
        *,
        precision: Precision,
        float8: Float8,
        rules: LayoutRules,
        host_saving: HostSaving = HostSaving.NEVER,
        measured: Measurements | None = None,
        prices: Prices | None = None,
    ) -> None:
        self.prices = prices or Prices()
        self.subject = subject
        self.orders = node_orders(cluster)
        self.cluster = self.orders[0]
        self.precision, self.float8 = precision, float8
        self.rules, self.host_saving = rules, host_saving
        self.measured = measured
        self.residence: Residence = residence(subject.graph, subject.layers)
        self.slowest_device = slowest_device(cluster)
        self._fastest: dict[_Setting, LayoutSolution] = {}
        self._fronts: dict[_Setting, tuple[LayoutSolution, ...]] = {}
        self._simpler: dict[LayerKey, LayoutSolution] = {}
        self._by_setting: dict[_Setting, LayoutPrices] = {}
        self._frames: dict[tuple[object, ...], LayoutFrame] = {}
        self._slowest: dict[tuple[LayerKey, Kind], tuple[Modes, ...]] = {}

    @property
    def may_save_more(self) -> bool:
        """Whether host modes were closed because recomputing is faster, though they save more."""
        return self.host_saving is HostSaving.IF_FASTER

    def pricer(self, share: RowShare, compile_: Compile) -> OpPricer:
        """Return the pricer for a device and its rows of a microbatch."""
        key, pricers = (share, compile_), self.prices.pricers
        if key not in pricers:
            pricers[key] = OpPricer(
                self.subject.graph,
                self.subject.axes,
                batch=share.rows,
                precision=self.precision,
                device=share.device,
                measured=self.measured,
                layers=self.subject.layers,
                compile_=compile_,
                float8=self.float8,
                alike=self.prices.alike,
            )
        return pricers[key]

    def _pricer(self, of: LayerKey | Arrangement) -> OpPricer:
        """Return the pricer of a microbatch on the slowest device."""
        return self.pricer(RowShare(self.slowest_device, of.microbatch), of.compile)

    def cluster_of(self, arrangement: Arrangement) -> Cluster:
        """Return the cluster with its nodes in the order of an arrangement."""
        return self.orders[arrangement.order]

    def tensor_shape(self, tensor: int) -> GroupShape:
        """Return the shape of the groups of the tensor axis."""
        return group_shape(self.cluster, tensor, 1)

    def fastest(self, of: LayerKey | Arrangement) -> LayoutSolution:
        """Return the fastest layouts inside the layers, regardless of memory."""
        key = _setting_of(of)
        if key not in self._fastest:
            known = self._at(of)
            if known.fastest is None:
                known.fastest = self._program(of).fastest()
            self._fastest[key] = known.fastest
        return self._fastest[key]

    def solutions(self, of: LayerKey | Arrangement) -> tuple[LayoutSolution, ...]:
        """Return layouts that trade time for memory, the fastest first."""
        key = _setting_of(of)
        if key not in self._fronts:
            known = self._at(of)
            if known.front is None:
                known.front = self._program(of).front()
            self._fronts[key] = known.front
        return self._fronts[key]

    def solution(self, inside: LayerKey) -> LayoutSolution:
        """Return one of the solutions, or simpler layouts near it."""
        if inside.lines is not None:
            return self._simpler_solution(inside, inside.lines)
        if inside.solution == 0:
            return self.fastest(inside)
        return self.solutions(inside)[inside.solution]

    def _simpler_solution(self, inside: LayerKey, price: LinePrice) -> LayoutSolution:
        if inside not in self._simpler:
            known = self._at(inside).simpler
            if inside not in known:
                known[inside] = self._program(inside).simpler(
                    inside.solution, price, is_one_stage=inside.is_one_stage
                )
            self._simpler[inside] = known[inside]
        return self._simpler[inside]

    def layout_report(self) -> SolverReport:
        """Return the solver's statistics for the layout programs."""
        fronts = {key: (one,) for key, one in self._fastest.items()} | self._fronts
        solved = [*(one for front in fronts.values() for one in front), *self._simpler.values()]
        return sum((one.report for one in solved), NOTHING_SOLVED)

    def _at(self, of: LayerKey | Arrangement) -> LayoutPrices:
        """Return the prices for these tensor ranks and rows on the slowest device."""
        key = _setting_of(of)
        if key not in self._by_setting:
            priced = LayoutKey(
                tensor=of.tensor,
                microbatch=of.microbatch,
                compile=of.compile,
                shape=self.tensor_shape(of.tensor),
                device=self.slowest_device,
                rules=self.rules,
                host_saving=self.host_saving,
            )
            self._by_setting[key] = self.prices.at(priced)
        return self._by_setting[key]

    @cached_property
    def structure(self) -> Structure:
        """What all layout problems share; built for the first one that is not recalled."""
        return structure_of(self.subject.graph, self.subject.axes, self.subject.layers)

    def _program(self, of: LayerKey | Arrangement) -> LayoutProgram:
        """Return the program for the cluster's slowest device, which the others wait for."""
        known = self._at(of)
        if known.program is None:
            asked = LayoutInput(
                graph=self.subject.graph,
                axes=self.subject.axes,
                layers=self.subject.layers,
                pricer=self._pricer(of),
                degree=of.tensor,
                shape=self.tensor_shape(of.tensor),
                rules=self.rules,
            )
            known.program = LayoutProgram(asked, _BUDGET, frame=self._frame(asked))
        return known.program

    def _frame(self, asked: LayoutInput) -> LayoutFrame:
        """Return the frame of a layout problem; similar problems share it."""
        key = asked.degree, asked.axes.batch_form(degree=asked.degree, batch=asked.batch)
        if key not in self._frames:
            self._frames[key] = frame_of(asked, self.structure)
        return self._frames[key]

    def rows(self, inside: LayerKey, share: RowShare) -> tuple[Modes, ...]:
        """Return each layer's cost in each recompute mode; equal layers are one object."""
        solution = self.solution(inside)  # counted as this search's, even if the rows are recalled
        key, known = (inside, share), self._at(inside).rows
        if key not in known:
            known[key] = self._priced(solution, inside, share)
        return known[key]

    def slowest_rows(self, inside: LayerKey, kind: Kind) -> tuple[Modes, ...]:
        """Return each layer's cost for ranks that wait for their slowest device."""
        key = inside, kind
        if key not in self._slowest:
            self._slowest[key] = slowest([self.rows(inside, share) for share in kind])
        return self._slowest[key]

    def _priced(
        self, solution: LayoutSolution, inside: LayerKey, share: RowShare
    ) -> tuple[Modes, ...]:
        parameters = {one.name: one.layout for one in solution.parameters}
        outside = {one.name: one.layout for one in solution.crossing}
        pricer = self.pricer(share, inside.compile)
        links = self._links(inside, share)
        known: dict[object, Modes] = {}
        rows: list[Modes] = []
        for position, layer in enumerate(self.subject.layers.layers):
            shared = self._shared[position] if inside.is_one_stage else self._tied
            circumstances = links[position], self._circumstances(position, layer, shared)
            if circumstances not in known:
                costs = layer_costs(
                    pricer,
                    layer,
                    self._own(solution, layer),
                    degree=inside.tensor,
                    shape=self.tensor_shape(inside.tensor),
                    parameters=parameters,
                    outside=outside,
                    shared=shared,
                    host_bytes_per_second=links[position],
                )
                known[circumstances] = {
                    mode: cost
                    for mode, cost in self._offered(costs, inside).items()
                    if mode.compiles or not pricer.compile.takes_layers
                }
            rows.append(known[circumstances])
        return tuple(rows)

    def _links(self, inside: LayerKey, share: RowShare) -> tuple[float, ...]:
        """Return each layer's rate of copies to the host; 0 if the layer saves nothing there.

        Under `IF_FASTER`, this is decided for the layer without tensor ranks. So all layouts have
        the same modes, and bounds over all layouts hold.
        """
        rate = read_framework_constants().host_link_share * share.device.host.bytes_per_second
        every = len(self.subject.layers.layers)
        if self.host_saving is not HostSaving.IF_FASTER or inside.tensor == 1:
            return (rate * (self.host_saving is not HostSaving.NEVER),) * every
        unsplit = self.rows(replace(inside, tensor=1, solution=0, lines=None), share)
        return tuple(rate * bool(modes[Recompute.HOST].host_saved_bytes) for modes in unsplit)

    def _offered(self, costs: Modes, inside: LayerKey) -> Modes:
        """Close full-host, and host if recomputing is as fast: they get the costs of `none`."""
        if self.host_saving is not HostSaving.IF_FASTER:
            return costs
        again = max(costs[x].backward_seconds for x in costs if x.runs_again and not x.is_on_host)
        is_first = inside.tensor == 1  # with tensor ranks, `_links` has decided it
        slow = {one for one, own in costs.items() if is_first and own.backward_seconds >= again}
        closed = [one for one in Recompute if one.is_on_host and (one.runs_again or one in slow)]
        return {**costs, **dict.fromkeys(closed, costs[Recompute.NONE])}

    @cached_property
    def _shared(self) -> tuple[SharedWeights, ...]:
        """The weights that each layer shares with others, if one rank has all layers."""
        names = {one.name for one in self.subject.graph.parameters}
        used = [parameters_of(layer, names) for layer in self.subject.layers.layers]
        before = [frozenset[str]().union(*used[:place]) for place in range(len(used))]
        behind = [frozenset[str]().union(*used[place + 1 :]) for place in range(len(used))]
        return tuple(
            SharedWeights(counted=own & earlier, waiting=(own | earlier) & later)
            for own, earlier, later in zip(used, before, behind, strict=True)
        )

    def tied_gradient_bytes(self, inside: LayerKey) -> int:
        """Return the bytes of the gradients of weights that the first and last layer share."""
        solution = self.solution(inside)
        parameters = {one.name: one.layout for one in solution.parameters}
        pricer = self._pricer(inside)
        elements = (
            pricer.elements(name, parameters[name], inside.tensor)
            for name in self._tied.tied.intersection(parameters)
        )
        return GRADIENT_BYTES * sum(elements)

    @cached_property
    def _tied(self) -> SharedWeights:
        """The weights that the first and the last layer share, if they are on different ranks."""
        names = {one.name for one in self.subject.graph.parameters}
        first, *others = (parameters_of(layer, names) for layer in self.subject.layers.layers)
        return SharedWeights(tied=first & others[-1]) if others else UNSHARED

    def _circumstances(self, position: int, layer: Layer, shared: SharedWeights) -> object:
        """Return a key that distinguishes the costs of layers of one class."""
        crossing = [self.subject.graph.tensors[name] for name in self.residence.cuts[position]]
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in crossing)
        return layer.layer_class, shared, shapes

    def _own(self, solution: LayoutSolution, layer: Layer) -> tuple[OpLayout, ...]:
        """Return the layouts of a layer's ops in the axes of its own tensors."""
        return own_layouts(solution.layouts, layer, self.subject.axes, self.structure.slots)


def _setting_of(of: LayerKey | Arrangement) -> _Setting:
    return of.tensor, of.microbatch, of.compile


def parameters_of(layer: Layer, parameters: Container[str]) -> frozenset[str]:
    """Return the parameters that a layer uses."""
    return frozenset(name for op in layer.ops for name in op.inputs if name in parameters)


def slowest_device(cluster: Cluster) -> Device:
    """Return the device with the lowest 16-bit peak, which the others wait for."""
    return min((node.device for node in cluster.nodes), key=half_peak)


def model_flops(subject: SearchSubject, global_batch: int) -> int:
    """Return the FLOPs of a step, without recomputation; equal layers have equally many."""
    batch, layers = subject.graph.fixed_batch or 1, subject.layers
    flops = sum(
        len(one.layers) * op_flops(op, subject.graph, subject.axes, batch=batch)
        for one in layers.classes
        for op in layers.layers[one.layers[0]].ops
    )
    return flops * global_batch // batch


_GREATEST = (
    *("forward_seconds", "recompute_seconds", "saved_bytes", "transient_bytes", "output_bytes"),
    *("learning_bytes", "learned_gradient_bytes", "early_gradient_bytes", "deferred_bytes"),
    "host_saved_bytes",
)


def slowest(rows: Sequence[tuple[Modes, ...]]) -> tuple[Modes, ...]:
    """Return each layer's cost on the slowest kind of device; equal layers stay one object.

    Forward, whole backward, and the part for input gradients are each taken from the device that is
    slowest in it. Saved bytes are those of the device that saves most.
    """
    if len(rows) == 1:
        return rows[0]
    known: dict[tuple[int, ...], Modes] = {}
    row = []
    for alternatives in zip(*rows, strict=True):
        key = tuple(map(id, alternatives))
        if key not in known:
            known[key] = {
                mode: _slowest([modes[mode] for modes in alternatives]) for mode in alternatives[0]
            }
        row.append(known[key])
    return tuple(row)


def _slowest(costs: Sequence[LayerCost]) -> LayerCost:
    """Return the maxima of times and sizes; other figures are those of the slowest device."""
    most = max(costs, key=lambda one: one.forward_seconds + one.backward_seconds)
    backward = max(one.backward_seconds for one in costs)
    inputs = max(one.backward_seconds - one.weight_gradient_seconds for one in costs)
    return replace(
        most,
        backward_seconds=backward,
        weight_gradient_seconds=backward - inputs,
        **{name: max(getattr(one, name) for one in costs) for name in _GREATEST},
    )
