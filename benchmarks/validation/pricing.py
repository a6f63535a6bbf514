"""Turns a traced model and the settings of a run into the costs of its stages' layers.

The layout on the tensor axis comes from the layout program, pinned to the usual one: attention is
split by heads, the MLP by its width, the vocabulary by its rows, and norms by the sequence if a run
is sequence parallel. A layer that repeats is priced once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.layers.flow import SharedWeights
from autopar.planner.costs.layers.layer import layer_costs
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.graph.layouts import WHOLE, Layout, OpLayout
from autopar.planner.precision import Precision
from autopar.planner.programs.layouts.building import LayoutInput
from autopar.planner.programs.layouts.choice import Budget, LayoutProgram
from autopar.planner.programs.layouts.rules import LayoutPin, LayoutRules, find_slots, own_layouts
from benchmarks.validation.host_work import HostWork, with_host
from benchmarks.validation.models import ModelShape, Traced, traced
from benchmarks.validation.practice import Practice, PracticePricer

_PINS: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "gpt2.py": (
            ("h.*.attn", "heads"),
            ("h.*.mlp", "ffn"),
            ("wte", "vocab"),
            ("lm_head", "vocab"),
        ),
        "llama.py": (
            ("layers.*.self_attn", "heads"),
            ("layers.*.mlp", "ffn"),
            ("embed_tokens", "vocab"),
            ("lm_head", "vocab"),
        ),
    }
)
_NORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt2.py": ("h.*.ln_*", "ln_f"),
        "llama.py": ("layers.*.*_layernorm", "norm"),
    }
)
_NOTHING: Mapping[str, Layout] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The costs of a model's layers: those before the repeated ones, a repeated one, those after.

    `tied_gradient_bytes` are the gradients of weights that the first layers share with the last.
    """

    before: tuple[LayerCost, ...]
    block: Mapping[Recompute, LayerCost]
    after: tuple[LayerCost, ...]
    tied_gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the price of a layer depends on, beside its model."""

    device: Device
    microbatch: int
    shape: GroupShape  # of the tensor axis
    is_sequence_parallel: bool
    practice: Practice
    host: HostWork
    is_one_stage: bool  # then weights that the first layers share with the last exist once


@lru_cache(maxsize=4096)
def priced(zoo: Path, model: ModelShape, kind: Kind) -> Priced:
    """Return what the layers of a model cost one rank."""
    found = traced(zoo, model)
    pricer = PracticePricer(
        found.graph,
        found.axes,
        batch=kind.microbatch,
        precision=Precision.BF16,
        device=kind.device,
        layers=found.layers,
        practice=kind.practice,
    )
    layouts, parameters = _undivided(found), _NOTHING
    if kind.shape.ranks > 1:
        layouts, parameters = _divided(
            zoo, model, kind.shape, kind.device, kind.is_sequence_parallel
        )
    return _costs(found, pricer, layouts, parameters, kind)


def _undivided(found: Traced) -> tuple[tuple[OpLayout, ...], ...]:
    return tuple(
        tuple(
            OpLayout(
                letter="",
                axis="",
                needs=(WHOLE,) * len(op.inputs),
                gives=(WHOLE,) * len(op.outputs),
            )
            for op in layer.ops
        )
        for layer in found.layers.layers
    )


@lru_cache(maxsize=1024)
def _divided(
    zoo: Path, model: ModelShape, shape: GroupShape, device: Device, is_sequence_parallel: bool
) -> tuple[tuple[tuple[OpLayout, ...], ...], Mapping[str, Layout]]:
    """Return the layouts of each layer, and of each parameter; every microbatch has the same."""
    found = traced(zoo, model)
    pricer = OpPricer(
        found.graph,
        found.axes,
        batch=1,
        precision=Precision.BF16,
        device=device,
        layers=found.layers,
    )
    asked = LayoutInput(
        graph=found.graph,
        axes=found.axes,
        layers=found.layers,
        pricer=pricer,
        degree=shape.ranks,
        shape=shape,
        rules=_rules(found, is_sequence_parallel=is_sequence_parallel),
    )
    solution = LayoutProgram(asked, Budget()).fastest()
    slots = find_slots(found.graph, found.axes, found.layers)
    layouts = tuple(
        own_layouts(solution.layouts, layer, found.axes, slots) for layer in found.layers.layers
    )
    return layouts, MappingProxyType({one.name: one.layout for one in solution.parameters})


def _rules(found: Traced, *, is_sequence_parallel: bool) -> LayoutRules:
    names = set(found.axes.names.values())
    pins = [LayoutPin(modules=modules, axis=axis) for modules, axis in _PINS[found.shape.file]]
    heads = next(axis for axis in ("kv_heads", "heads", "group") if axis in names)
    pins = [LayoutPin(modules=p.modules, axis=heads) if p.axis == "heads" else p for p in pins]
    if is_sequence_parallel:
        pins += [LayoutPin(modules=norm, axis="seq") for norm in _NORMS[found.shape.file]]
    forbidden = {"batch", "positions"} if is_sequence_parallel else {"batch", "positions", "seq"}
    return LayoutRules(forbidden=tuple(sorted(forbidden & names)), pins=tuple(pins))


def _costs(
    found: Traced,
    pricer: OpPricer,
    layouts: Sequence[Sequence[OpLayout]],
    parameters: Mapping[str, Layout],
    kind: Kind,
) -> Priced:
    """Price the layers in order; each gets the layouts and weights of the earlier ones."""
    outside: dict[str, Layout] = {}
    held: set[str] = set()
    before: list[LayerCost] = []
    after: list[LayerCost] = []
    block: Mapping[Recompute, LayerCost] | None = None
    for layer, own in zip(found.layers.layers, layouts, strict=True):
        costs = layer_costs(
            pricer, layer, own, degree=kind.shape.ranks, shape=kind.shape, parameters=parameters,
            outside=dict(outside), shared=SharedWeights(counted=frozenset(held)),
        )  # fmt: skip
        for op, layout in zip(layer.ops, own, strict=True):
            outside.update(zip(op.outputs, layout.gives, strict=True))
            held.update(op.inputs if kind.is_one_stage else ())
        hosted = _hosted(costs, len(layer.ops), kind)
        if layer.layer_class == found.block:
            block = block or hosted
        else:
            (after if block else before).append(hosted[Recompute.NONE])
    assert block is not None
    return Priced(
        before=tuple(before),
        block=block,
        after=tuple(after),
        tied_gradient_bytes=after[-1].gradient_bytes
        if found.shape.is_tied and not kind.is_one_stage
        else 0,
    )


def _hosted(
    costs: Mapping[Recompute, LayerCost], ops: int, kind: Kind
) -> Mapping[Recompute, LayerCost]:
    """Add the host's work: a split layer's forward has two collectives, four with split norms."""
    collectives = 0 if kind.shape.ranks == 1 else 4 if kind.is_sequence_parallel else 2
    return {
        mode: with_host(cost, kind.host, ops=ops, collectives=collectives, recompute=mode)
        for mode, cost in costs.items()
    }
