"""Turns what a person declared into what the programs understand: rules, pins, modes, limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from operator import or_

from autopar.planner.axes.infer import Axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.units import bytes_text
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InputError
from autopar.planner.findings.recomputable import unable
from autopar.planner.plan.declared.constraints import USUAL_MEMORY, Constraints, covers
from autopar.planner.plan.search.space import DEFAULT_BUCKET_BYTES, Choices
from autopar.planner.plan.solving.costing import Subject
from autopar.planner.plan.solving.questions import Demands
from autopar.planner.programs.layouts.rules import Ban, LayoutRules
from autopar.planner.programs.layouts.rules import Pin as LayoutPin
from autopar.planner.programs.stages.question import Pin

BUCKETS_BYTES = (DEFAULT_BUCKET_BYTES, 100 * 2**20, 400 * 2**20)
EVERYWHERE = "*"
OF_THE_DATA_AXIS = frozenset({"batch"})


def layout_rules(constraints: Constraints, axes: Axes) -> LayoutRules:
    """Return the rules for layouts: axes forbidden in some modules or in all, pinned modules.

    The batch is what the data axis splits; the tensor axis splits it where it is asked to, or where
    rows meet, which data ranks could not have.
    """
    unwanted = [rule for rule in constraints.splits if not rule.is_required]
    forbidden = {rule.axis for rule in unwanted if rule.modules == EVERYWHERE}
    bans = tuple(
        Ban(modules=rule.modules, axis=rule.axis) for rule in unwanted if rule.modules != EVERYWHERE
    )
    pins = tuple(
        LayoutPin(modules=rule.modules, axis=rule.axis)
        for rule in constraints.splits
        if rule.is_required
    )
    known = frozenset(axes.names.values())
    wanted = {rule.axis for rule in constraints.splits if rule.is_required}
    reserved = frozenset() if constraints.shares_rows else OF_THE_DATA_AXIS
    return LayoutRules(
        forbidden=frozenset(forbidden | (reserved - wanted)) & known,
        pins=pins,
        bans=bans,
    )


def check_memory(cluster: Cluster, constraints: Constraints) -> None:
    """Refuse a limit that no device reaches: who says it takes the devices for larger ones."""
    wanted = constraints.memory
    largest = max((node.device for node in cluster.nodes), key=lambda one: one.memory_bytes)
    if wanted is None or (wanted.size_bytes or 0) <= largest.memory_bytes:
        return
    declared = next(one for one in reversed(constraints.declared) if one.field == "memory")
    has = bytes_text(largest.memory_bytes)
    raise InputError(
        f"a limit of {bytes_text(wanted.size_bytes or 0)} for each device, and {largest.name} has "
        f"{has}",
        where=declared.origin,
        expected=f'at most "{has}", or a share of what a device has, such as "90%"',
        fix="a device with more memory goes into a cluster file, see docs/cluster-file.md",
    )


def limits_of(cluster: Cluster, constraints: Constraints) -> Mapping[str, int]:
    """Return the bytes that a rank may use of each kind of device."""
    limits = {}
    for node in cluster.nodes:
        memory = node.device.memory_bytes
        wanted = constraints.memory or USUAL_MEMORY
        limits[node.device.name] = wanted.bytes_of(memory)
    return limits


def demands_of(subject: Subject, cluster: Cluster, constraints: Constraints) -> Demands:
    """Return what every candidate has to respect."""
    return Demands(
        limit_bytes=limits_of(cluster, constraints),
        modes=tuple(_modes(subject, constraints)),
        pins=tuple(
            Pin(layer=position, stage=pin.stage)
            for pin in constraints.stages
            for position in _positions(subject)
            if _is_meant(subject, position, pin.modules)
        ),
        is_cuttable=tuple(_cuttable(subject)),
        may_waste_ranks=constraints.tensor is not None,
        bucket_bytes=constraints.bucket_bytes or BUCKETS_BYTES,
    )


def learning(subject: Subject) -> Iterator[bool]:
    """Yield for each layer whether it learns, or passes on what others have learned.

    What nothing learns from is computed where it is needed: a stage of such layers alone is empty.
    """
    for layer in subject.layers.layers:
        yield any(map(subject.graph.learns, layer.ops))


def shared_buffers(subject: Subject) -> Mapping[str, tuple[int, int]]:
    """Return the first and last layer of buffers that the forward writes, and several layers use.

    Stages would have one of their own each, so these layers are not cut apart.
    """
    graph, written = subject.graph, {one.name for one in subject.graph.buffers if one.updated}
    homes = defaultdict[str, list[int]](list)
    for position, layer in enumerate(subject.layers.layers):
        for op in layer.ops:
            for storage in written & graph.index.storages(op.inputs):
                homes[storage].append(position)
    return {name: (used[0], used[-1]) for name, used in homes.items() if used[0] < used[-1]}


def _cuttable(subject: Subject) -> Iterator[bool]:
    """Yield for each layer whether a stage may end with it."""
    learned, spans = accumulate(learning(subject), or_), shared_buffers(subject).values()
    for position, has_learned in enumerate(learned):
        yield has_learned and not any(first <= position < last for first, last in spans)


def choices_of(subject: Subject, cluster: Cluster, constraints: Constraints) -> Choices:
    """Return what the variants of a point may differ in."""
    return Choices(
        schedules=constraints.schedules,
        zero_levels=constraints.zero_levels,
        compressed=constraints.compression,
        stages_per_rank=constraints.stages_per_rank,
        shard=constraints.shard,
        node_devices=min(node.devices for node in cluster.nodes),
        layers=len(subject.layers.layers),
    )


def _positions(subject: Subject) -> range:
    return range(len(subject.layers.layers))


def _modes(subject: Subject, constraints: Constraints) -> Iterator[frozenset[Recompute]]:
    """Yield the recompute modes of each layer: the one of the last rule that means it, or all."""
    every = subject.layers.layers
    for position, without in enumerate(unable(every, subject.graph)):
        pins = [pin for pin in constraints.recompute if _is_meant(subject, position, pin.modules)]
        if not pins:
            yield frozenset(Recompute).difference(without)
            continue
        mode = pins[-1].mode
        if mode in without:
            call = subject.graph.calls.get(every[position].call)
            raise InputError(
                f"layer {call.path if call else 'model'!r} cannot be recomputed ({mode}): "
                f"{without[mode].why}",
                where=without[mode].where,
                expected="modules that can run again in their backward",
                fix="name others in the rule, or another mode behind it: recompute none always "
                "works",
            )
        yield frozenset({mode})


def _is_meant(subject: Subject, position: int, modules: str) -> bool:
    call = subject.layers.layers[position].call
    calls = subject.graph.calls
    return covers(modules, calls[call].path if call in calls else "")
