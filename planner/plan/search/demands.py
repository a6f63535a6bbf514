"""Turns constraints into rules, limits and choices of a search, or says why no plan fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import or_

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.toml_reading import bytes_text
from autopar.planner.costs.prediction import Offload, Recompute, Zero
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.stage_load import least_host
from autopar.planner.errors import InfeasibleError, InputError, TimeLimitError
from autopar.planner.findings.writes import unable
from autopar.planner.layers import Compile
from autopar.planner.plan.declared.constraints import (
    DEFAULT_HOST_MEMORY,
    DEFAULT_MEMORY,
    Constraints,
    Declared,
    HostSaving,
    compressions,
    conflict_text,
    constraints_of,
    covers,
    local_steps,
)
from autopar.planner.plan.declared.limits import zero_words
from autopar.planner.plan.search.best_first import FoundLeaf
from autopar.planner.plan.search.space import DEFAULT_BUCKET_BYTES, Choices
from autopar.planner.plan.solving.candidate import Candidate, Demands
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.plan.telling.words import arrangement_words
from autopar.planner.programs.layouts.rules import Ban, LayoutPin, LayoutRules
from autopar.planner.programs.stages.question import PinnedLayer

BUCKETS_BYTES = (DEFAULT_BUCKET_BYTES, 100 * 2**20, 400 * 2**20)
EVERYWHERE = "*"
OF_THE_DATA_AXIS = frozenset({"batch"})


def layout_rules(constraints: Constraints, axes: GraphAxes) -> LayoutRules:
    """Return the rules for layouts: axes forbidden in modules, and pinned modules.

    The data axis splits the batch. The tensor axis splits it only if a rule demands that, or if
    rows depend on each other, so that there are no data ranks.
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
        forbidden=tuple(sorted((forbidden | (reserved - wanted)) & known)),
        pins=pins,
        bans=bans,
    )


def check_memory(cluster: Cluster, constraints: Constraints) -> None:
    """Raise for a limit above every device's memory: the user assumes larger devices."""
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
    """Return the memory limit of each kind of device."""
    limits = {}
    for node in cluster.nodes:
        memory = node.device.memory_bytes
        wanted = constraints.memory or DEFAULT_MEMORY
        limits[node.device.name] = wanted.bytes_of(memory)
    return limits


def host_limit_of(cluster: Cluster, constraints: Constraints) -> int:
    """Return the limit for a device's share of its host's memory."""
    memory = least_host(cluster).memory_bytes
    return (constraints.host_memory or DEFAULT_HOST_MEMORY).bytes_of(memory)


def demands_of(subject: SearchSubject, cluster: Cluster, constraints: Constraints) -> Demands:
    """Return the limits, pins and recompute modes that every candidate must respect."""
    return Demands(
        limit_bytes=limits_of(cluster, constraints),
        host_limit_bytes=host_limit_of(cluster, constraints),
        modes=tuple(_modes(subject, cluster, constraints)),
        pins=tuple(
            PinnedLayer(layer=position, stage=pin.stage)
            for pin in constraints.stages
            for position in _positions(subject)
            if _is_meant(subject, position, pin.modules)
        ),
        is_cuttable=tuple(_cuttable(subject)),
        may_waste_ranks=constraints.tensor is not None,
        bucket_bytes=constraints.bucket_bytes or BUCKETS_BYTES,
    )


def learning(subject: SearchSubject) -> Iterator[bool]:
    """Yield for each layer whether it is trained or passes gradients on.

    Other layers are computed wherever they are needed, so a stage of only these would be empty.
    """
    for layer in subject.layers.layers:
        yield any(map(subject.graph.learns, layer.ops))


def shared_buffers(subject: SearchSubject) -> Mapping[str, tuple[int, int]]:
    """Return the first and last layer that use a buffer, for buffers that the forward writes.

    Each stage would have its own copy, so these layers are not cut apart.
    """
    graph, written = subject.graph, {one.name for one in subject.graph.buffers if one.updated}
    homes = defaultdict[str, list[int]](list)
    for position, layer in enumerate(subject.layers.layers):
        for op in layer.ops:
            for storage in written & graph.index.storages(op.inputs):
                homes[storage].append(position)
    return {name: (used[0], used[-1]) for name, used in homes.items() if used[0] < used[-1]}


def _cuttable(subject: SearchSubject) -> Iterator[bool]:
    """Yield for each layer whether a stage may end with it."""
    learned, spans = accumulate(learning(subject), or_), shared_buffers(subject).values()
    for position, has_learned in enumerate(learned):
        yield has_learned and not any(first <= position < last for first, last in spans)


def choices_of(subject: SearchSubject, cluster: Cluster, constraints: Constraints) -> Choices:
    """Return the settings among which a point's variants choose."""
    return Choices(
        schedules=constraints.schedules,
        zero_levels=constraints.zero_levels,
        compressed=compressions(constraints),
        compiles=tuple(_compiles(cluster, constraints)),
        offloads=tuple(_offloads(cluster, constraints)),
        stages_per_rank=constraints.stages_per_rank,
        shard=constraints.shard,
        local_steps=local_steps(constraints),
        outer=constraints.outer,
        outer_parts=constraints.outer_parts,
        node_devices=min(node.devices for node in cluster.nodes),
        layers=len(subject.layers.layers),
    )


def _compiles(cluster: Cluster, constraints: Constraints) -> Iterator[Compile]:
    """Yield the choices of compilation: the declared one, or else NONE and, on GPUs, LAYERS.

    LAYERS is left out if a pinned recompute mode does not work in compiled layers.
    """
    if constraints.compile is not None:
        yield constraints.compile
        return
    yield Compile.NONE
    is_gpu = not any(node.device.is_cpu for node in cluster.nodes)
    if is_gpu and all(pin.mode.compiles for pin in constraints.recompute):
        yield Compile.LAYERS


def may_compile(cluster: Cluster, constraints: Constraints) -> bool:
    """Whether the search looks at plans with compiled layers."""
    return any(one.takes_layers for one in _compiles(cluster, constraints))


def _offloads(cluster: Cluster, constraints: Constraints) -> tuple[Offload, ...]:
    """Return the choices of offload: the declared ones, or else all, but on CPUs only NONE."""
    is_open = constraints.offloads == tuple(Offload)
    is_cpu = any(node.device.is_cpu for node in cluster.nodes)
    return (Offload.NONE,) if is_cpu and is_open else constraints.offloads


def _positions(subject: SearchSubject) -> range:
    return range(len(subject.layers.layers))


def host_saving(cluster: Cluster, constraints: Constraints) -> HostSaving:
    """Return when layers may keep tensors on the host.

    They may always if a rule asks for it, or if the objective is the least memory of devices. On
    CPUs only a rule allows it, because the host's memory is the device's.
    """
    if any(pin.mode.is_on_host for pin in constraints.recompute):
        return HostSaving.ALWAYS
    if any(node.device.is_cpu for node in cluster.nodes):
        return HostSaving.NEVER
    return HostSaving.ALWAYS if constraints.objective.memory_alone else constraints.host_saving


def needs_host(found: Sequence[FoundLeaf[Candidate]], constraints: Constraints) -> bool:
    """Whether nothing fits, or only plans with the optimizer on the host, which nobody demanded.

    Layers that save tensors on the host may then be enough: their copies usually take less time
    than an optimizer step on the host.
    """
    is_asked = all(one.has_states for one in constraints.offloads)
    return not found or (
        not is_asked and all(one.leaf.arrangement.offload.has_states for one in found)
    )


def _modes(
    subject: SearchSubject, cluster: Cluster, constraints: Constraints
) -> Iterator[frozenset[Recompute]]:
    """Yield each layer's recompute modes: that of the last rule for it, or all.

    If a rule sends the tensors of some layers to the host, those of all others stay on the device.
    """
    every = subject.layers.layers
    is_compiled = (constraints.compile or Compile.NONE).takes_layers
    modes = frozenset(mode for mode in Recompute if mode.compiles or not is_compiled)
    is_asked = any(pin.mode.is_on_host for pin in constraints.recompute)
    is_closed = host_saving(cluster, constraints) is HostSaving.NEVER or is_asked
    free = frozenset(mode for mode in modes if not (mode.is_on_host and is_closed))
    for position, without in enumerate(
        unable(every, subject.graph, precision=constraints.precision)
    ):
        pins = [pin for pin in constraints.recompute if _is_meant(subject, position, pin.modules)]
        if not pins:
            yield free.difference(without)
            continue
        mode = pins[-1].mode
        if mode not in modes:
            raise InputError(
                f"compiled layers cannot be recomputed in the mode {mode}",
                expected=f"one of {', '.join(sorted(modes))}: inductor itself decides which ops of "
                "a compiled layer are recomputed",
                fix=f"leave out compile={constraints.compile}, or this rule",
            )
        if mode in without:
            call = subject.graph.calls.get(every[position].call)
            raise InputError(
                f"layer {call.path if call else 'model'!r} cannot be recomputed ({mode}): "
                f"{without[mode].why}",
                where=without[mode].where,
                expected="modules that can run again in their backward",
                fix="name other modules in the rule, or add a rule after it with another mode: "
                "recompute none always works",
            )
        yield frozenset({mode})


def _is_meant(subject: SearchSubject, position: int, modules: str) -> bool:
    call = subject.layers.layers[position].call
    calls = subject.graph.calls
    return covers(modules, calls[call].path if call in calls else "")


def too_late(waiting: int) -> TimeLimitError:
    """Return the error of a search that found nothing in time."""
    return TimeLimitError(
        "the time limit came before any plan was found",
        expected=f"{waiting} arrangements were still open",
        fix="allow more time with --time-limit, or pin degrees with --pin",
    )


def nothing_runs(
    conflict: Sequence[Declared], subject: SearchSubject, *, devices: int
) -> InfeasibleError:
    """Return the error of a space without any arrangement, regardless of memory.

    If constraints are the cause, `conflict` holds a minimal set of them.
    """
    on = f"on {devices} device{'s' * (devices > 1)}"
    if not conflict:
        return InfeasibleError(
            f"{on} no arrangement can run the model", fix="use another number of devices"
        )
    return InfeasibleError(
        f"{on} no plan satisfies {conflict_text(conflict)}",
        expected=_expected(
            conflict, layers=sum(learning(subject)), shared=tuple(shared_buffers(subject))
        ),
        fix="leave one of them out, or change it"
        if len(conflict) > 1
        else "leave it out, or change it",
    )


def _expected(conflict: Sequence[Declared], *, layers: int, shared: Sequence[str]) -> str:
    chosen = constraints_of(conflict)
    splits = all(SCHEDULES[kind].splits_backward for kind in chosen.schedules)
    if splits and all(level.shards_modules for level in chosen.zero_levels):
        whole = zero_words(level for level in Zero if not level.shards_modules)
        return (
            f"{whole} with zero bubble: backwards in halves keep parameters and gradients whole "
            "until the last microbatch"
        )
    if all(one.has_outer for one in chosen.offloads):
        return "local steps of several replicas, whose outer optimizer may be on the host"
    sent = compressions(chosen)
    if all(one.keeps_lost for one in sent):
        return (
            f"ZeRO 0 or 1, bf16 or fp32, and no offloading with gradients {sent[0].sums}: a rank "
            "keeps the rounding errors of all its gradients, which it sends once in a step"
        )
    if splits and (chosen.compile or Compile.NONE).takes_layers:
        return "a schedule whose backwards are whole: those of compiled layers cannot be halved"
    if (chosen.compile or Compile.NONE).fuses_messages:
        return "tensor ranks within a node, whose messages can be fused"
    if _is_about_stages(conflict) or shared:
        return (
            f"stages of whole layers in the model's order, each with some of its {layers} layers "
            f"that learn{_beside(shared)}"
        )
    return ""


def _beside(shared: Sequence[str]) -> str:
    name = next(iter(shared), "")
    return f"; all layers that use the buffer {name}, which they write, in one" if name else ""


def _is_about_stages(conflict: Sequence[Declared]) -> bool:
    fields = {one.field for one in conflict}
    leaves_the_rest = {"data", "tensor"} <= fields  # the other devices are for the pipeline
    return leaves_the_rest or not fields.isdisjoint(("pipeline", "stages_per_rank", "stages"))


def too_large(least: Candidate, demands: Demands, cluster: Cluster) -> InfeasibleError:
    """Return the error of a memory limit below the smallest plan, to the byte."""
    needed_bytes = least.prediction.peak_memory.device_bytes
    limit_bytes = min(demands.limit_bytes.values())
    if needed_bytes <= limit_bytes:
        return _host_too_small(least, demands)
    return InfeasibleError(
        f"no plan fits: every one needs {_exact(needed_bytes)} or more on a device, and "
        f"{_exact(limit_bytes)} may be used: {_exact(needed_bytes - limit_bytes)} short",
        where=f"the least is with {arrangement_words(least.arrangement)}",
        fix=_nearest_change(needed_bytes, cluster),
    )


def _host_too_small(least: Candidate, demands: Demands) -> InfeasibleError:
    needed = max(one.memory.host_bytes for one in least.prediction.stages)
    saves = any(mode.is_on_host for stage in least.stages for mode in stage.recompute)
    parts = ["the optimizer"] * least.arrangement.offload.has_states
    parts += ["the outer optimizer"] * least.arrangement.offload.has_outer
    parts += ["what layers save for the backward"] * saves
    return InfeasibleError(
        f"no plan fits: the devices have room with {' and '.join(parts)} on the host, which then "
        f"needs {_exact(needed)} for each device, and {_exact(demands.host_limit_bytes)} may be "
        "used",
        where=f"the least is with {arrangement_words(least.arrangement)}",
        fix="give the machine's real memory as host_memory in a cluster file, allow more of it by "
        "--host-memory, or take more devices",
    )


def _exact(size_bytes: int) -> str:
    """Return a readable size, with the number of bytes if that is rounded."""
    if size_bytes < 2**20:
        return f"{size_bytes:,} B"
    return f"{bytes_text(size_bytes)} ({size_bytes:,} B)"


def _nearest_change(needed_bytes: int, cluster: Cluster) -> str:
    memory = min(node.device.memory_bytes for node in cluster.nodes)
    if needed_bytes <= memory:
        return f'allow more of the device: --memory "{needed_bytes} B"'
    return "take more devices, devices with more memory, or a smaller global batch"
