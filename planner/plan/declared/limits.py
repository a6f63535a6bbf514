"""Limits that a model puts on its plans: whole batches, single rows, scalars, its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil, prod
from typing import Any

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.prediction import Arrangement, Offload, Recompute, Zero
from autopar.planner.errors import InfeasibleError
from autopar.planner.findings import OptimizerTraits, ParameterPart, Reach
from autopar.planner.findings.rows import meeting_rows, norm_of_rows, squeezing_rows
from autopar.planner.graph.graph import BackwardFault, Graph
from autopar.planner.graph.ops import GradientUse, Op, OwnGradient
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    RecomputePin,
    constraints_of,
    covers,
    local_steps,
)
from autopar.planner.precision import Allowed
from autopar.planner.rules.table import takes_statistics

_UNDIVIDED = tuple(level for level in Zero if not level.divides_optimizer)
_STEPPED_HERE = tuple(one for one in Offload if not one.has_states)
_HERE_WORDS = "the optimizer on the device"
_WHOLE_MODULES = tuple(level for level in Zero if not level.shards_modules)
_NEVER_FLAT = tuple(level for level in Zero if not level.gathers_updated)
_ROWS_PER_DEVICE = 8
# A step has eight rows for each device, up to the first limit; beyond it one row for each device,
# up to the second. Tokens of a step: Llama 2 took 4 M and Llama 3 16 M. Rows of a step: ResNet-50
# took 8,192 (Goyal et al., 2017), CLIP 32,768.
_TOKENS_OF_A_STEP = (2**22, 2**24)
_ROWS_OF_A_STEP = (2**13, 2**15)  # where a row is no sequence of tokens


def zero_words(levels: Iterable[Zero]) -> str:
    """Return how ZeRO levels are asked for: "zero=0 or zero=1"."""
    return " or ".join(f"zero={level.value}" for level in levels)


def with_whole_scalars(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints without fully_shard, if a parameter is a scalar."""
    scalar = next((one.name for one in graph.parameters if not one.shape), None)
    if scalar is None:
        return constraints
    levels = tuple(level for level in constraints.zero_levels if level in _WHOLE_MODULES)
    if not levels:
        raise InfeasibleError(
            f"{zero_words(constraints.zero_levels)} would cut every parameter, and {scalar} has no "
            "dim to cut",
            expected=f"{zero_words(_WHOLE_MODULES)} for a model with a parameter that is a single "
            "number",
            fix="allow zero=1, or give the parameter a dim: nn.Parameter(torch.tensor([1.0]))",
        )
    return replace(constraints, zero_levels=levels)


def with_whole_batch(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints with dp=1 and one microbatch, if rows depend on each other.

    Pins that split the batch take precedence. The tensor axis may split such a batch, because
    tensor ranks exchange the values that rows need. If the model accepts only one number of rows,
    the graph cannot show whether they depend on each other, so the tensor axis may split its batch,
    too. The global batch must be known.
    """
    constraints = _with_whole_statistics(constraints, graph)
    if splits_batch(constraints):
        return constraints
    met = meeting_rows(graph)
    if met is None and graph.fixed_batch is None:
        return constraints
    if met is None:
        return replace(constraints, shares_rows=True)
    assert constraints.global_batch is not None
    whole = {"dp": ("data", 1), "microbatch": ("microbatch", constraints.global_batch)}
    own = tuple(
        Declared(
            place=f"pins.{name}",
            field=field,
            value=value,
            text=f"{name}={value}",
            origin=f"the rows of a batch meet in {met.name}",
        )
        for name, (field, value) in whole.items()
        if getattr(constraints, field) is None
    )
    return replace(
        constraints,
        data=1,
        microbatch=constraints.global_batch,
        shares_rows=True,
        declared=(*constraints.declared, *own),
    )


def _with_whole_statistics(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints with one microbatch, if batch norms take statistics over rows.

    Data ranks share statistics, but microbatches run one after another: with several of them a
    model trains otherwise than on one device. Pins of microbatch, or an explicit permission, allow
    that.
    """
    norm = None if keeps_statistics_apart(constraints) else norm_of_rows(graph)
    if norm is None:
        return constraints
    own = Declared(
        place="choices.one_microbatch",
        field="one_microbatch",
        value=True,
        text="one microbatch on each data rank",
        origin=f"{norm.name} takes statistics of all rows; microbatch_statistics = true, or a pin "
        "of microbatch, allows more",
    )
    return replace(constraints, one_microbatch=True, declared=(*constraints.declared, own))


def keeps_statistics_apart(constraints: Constraints) -> bool:
    """Whether the user allows batch norms to take statistics per microbatch."""
    return constraints.statistics_apart or constraints.microbatch is not None


def splits_batch(constraints: Constraints) -> bool:
    """Whether the user says how the batch is split; one microbatch of all rows is no split."""
    is_whole = constraints.microbatch in (None, constraints.global_batch)
    return not is_whole or constraints.data not in (None, 1)


def rows_at_once(constraints: Constraints) -> int | None:
    """Return the rows of an unsplit batch, for a model that accepts only one number of rows.

    None if the user splits the batch: the graph then cannot show whether rows depend on each other.
    """
    return None if splits_batch(constraints) else constraints.global_batch


def least_rows(graph: Graph, *, data: int) -> int:
    """Return the fewest rows that a microbatch may have, if `data` ranks share statistics."""
    is_lone = _one_row_apart(graph) is not None or (data == 1 and _norm_of_rows(graph) is not None)
    return 2 if is_lone else 1


def _one_row_apart(graph: Graph) -> tuple[str, str, str] | None:
    """Return what a model does otherwise with a single row, where, and a fix; or None."""
    if (squeezing := squeezing_rows(graph)) is not None:
        fix = "name the dim to squeeze (x.squeeze(-1))"
        return f"which {squeezing.name} squeezes away", squeezing.location, fix
    decided = "for which the model runs other code", graph.lone_at, "leave the decision out"
    return decided if graph.lone_at else None


def check_lone_rows(constraints: Constraints, graph: Graph) -> None:
    """Raise if microbatches would have one row, and the model does not accept that."""
    apart, norm = _one_row_apart(graph), _norm_of_rows(graph)
    least, data = constraints.microbatch, constraints.data or 1
    expected = "two rows or more in each microbatch"
    if apart is not None and (least == 1 or constraints.global_batch == data):
        what, where, fix = apart
        raise InfeasibleError(
            f"a microbatch would have one row, {what}",
            where=where,
            expected=expected,
            fix=f"{fix}, or take a larger global batch",
        )
    is_replica = constraints.shard == 1 and 1 not in local_steps(constraints)  # each rank is one
    is_one_row = least == 1 or constraints.global_batch == data
    is_lone = (constraints.data == 1 or is_replica) and is_one_row
    if norm is not None and (is_lone or constraints.global_batch == 1):
        raise InfeasibleError(
            f"a microbatch would have one row, and {norm.name} norms one number for each row",
            where=norm.location,
            expected=f"{expected}, or {'replicas of several ' * is_replica}data ranks, which share "
            "the statistics of theirs",
            fix="take a larger microbatch, or leave it out",
        )


def _norm_of_rows(graph: Graph) -> Op | None:
    """Return the first batch norm in training mode that norms one number per row and channel."""
    for op in graph.ops:
        if takes_statistics(op):
            rows, _, *rest = graph.tensors[op.inputs[0]].shape
            if not rows.is_constant and prod(size.at(1) for size in (rows, *rest)) == 1:
                return op
    return None


def with_optimizer(constraints: Constraints, traits: OptimizerTraits | None) -> Constraints:
    """Return the constraints without plans under which the optimizer would train differently."""
    own = () if traits is None else tuple(_demands(traits))
    return constraints_of((*constraints.declared, *own)) if own else constraints


def _demands(traits: OptimizerTraits) -> Iterator[Declared]:
    if traits.reach >= Reach.PARAMETER:
        why = f"{traits.name} updates a parameter as a whole"
        yield _declared("tp", "max_tensor", 1, "at most tp=1", why)
        yield _declared("zero", "zero_levels", _UNDIVIDED, zero_words(_UNDIVIDED), why)
        yield _declared("place", "offloads", _STEPPED_HERE, _HERE_WORDS, why)
    if traits.reach is Reach.MODEL:
        why = f"{traits.name} updates all parameters as a whole"
        yield _declared("pp", "max_pipeline", 1, "at most pp=1", why)
    elif traits.groups_by_position:
        why = "build_optimizer groups parameters by their positions in the model"
        yield _declared("pp", "max_pipeline", 1, "at most pp=1", why)
    yield from _demands_of_parts(traits)
    if traits.own_tensors:
        why = f"{traits.name} keeps whole tensors beside its state, in {traits.own_tensors[0]}"
        yield _declared("own", "zero_levels", _UNDIVIDED, zero_words(_UNDIVIDED), why)
        yield _declared("own place", "offloads", _STEPPED_HERE, _HERE_WORDS, why)
    if traits.draws:
        why = f"{traits.name} draws random numbers, which copies of a parameter would not share"
        yield _declared("tp", "max_tensor", 1, "at most tp=1", why)
        yield _declared("copies", "steps_once", True, "one update of each parameter", why)


def _demands_of_parts(traits: OptimizerTraits) -> Iterator[Declared]:
    """Yield demands of an optimizer to which sizes or dims of parameters matter."""
    why = f"{traits.name} reads sizes or dims of parameters, and its part of one has others"
    if ParameterPart.SHARD in traits.unlike_parts or traits.groups_by_size:
        by = "build_optimizer reads sizes of parameters" if traits.groups_by_size else why
        yield _declared("shapes", "max_tensor", 1, "at most tp=1", by)
    if ParameterPart.ROWS in traits.unlike_parts:
        yield _declared("rows", "zero_levels", _WHOLE_MODULES, zero_words(_WHOLE_MODULES), why)
    if ParameterPart.FLAT in traits.unlike_parts:
        yield _declared("flat", "zero_levels", _NEVER_FLAT, zero_words(_NEVER_FLAT), why)
        yield _declared("flat place", "offloads", _STEPPED_HERE, _HERE_WORDS, why)


def _declared(name: str, field: str, value: Any, text: str, why: str) -> Declared:
    return Declared(place=f"optimizer {name}", field=field, value=value, text=text, origin=why)


_ROOT = ""


def with_own_gradients(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints without plans that break a model's own use of gradients.

    A tensor rank has a shard or a partial sum of a gradient. If the model computes a gradient
    (torch.autograd.grad), everything on its path must be on one rank: no pipeline, and no gathered
    parameters that are freed before the second backward. A retained gradient changes nothing.
    """
    own = tuple(one for found in graph.own_gradients for one in _gradient_demands(found))
    return constraints_of((*constraints.declared, *own)) if own else constraints


def _gradient_demands(found: OwnGradient) -> Iterator[Declared]:
    if found.use is GradientUse.KEPT:
        return
    why = gradient_words(found)
    is_taken = found.use is GradientUse.TAKEN
    yield _gradient_declared("tp", "max_tensor", 1, "at most tp=1", why)
    if is_taken or found.call == _ROOT:  # the root's code is printed in every stage
        yield _gradient_declared("pp", "max_pipeline", 1, "at most pp=1", why)
    yield _gradient_declared("place", "offloads", _STEPPED_HERE, _HERE_WORDS, why)
    if is_taken:
        text = zero_words(_WHOLE_MODULES)
        yield _gradient_declared("zero", "zero_levels", _WHOLE_MODULES, text, why)


def gradient_words(found: OwnGradient) -> str:
    """Describe what a model does with gradients, and where."""
    does = "takes" if found.use is GradientUse.TAKEN else "changes"
    return f"the model itself {does} gradients, by {found.how} at {found.where}"


def gradients_changed(graph: Graph, arranged: Arrangement) -> str:
    """Return how a hook that no trace shows gets the gradients of a split batch, or ""."""
    own = next(graph.unread_changes, None)
    if own is None or arranged.data * arranged.microbatches == 1:
        return ""
    is_whole = arranged.data == 1 or takes_whole_gradients(graph, arranged)
    times = "" if is_whole else f", {arranged.data} times as large"
    does = "scale, mask or clip each element" if is_whole else "scale or mask it"
    return (
        f"{gradient_words(own)}. There it gets the gradient of one microbatch of one data rank"
        f"{times}: to {does} trains as on one device, to normalize it does not."
    )


def unread_backward(graph: Graph, arranged: Arrangement) -> str:
    """Return which backward of the model's own no trace shows, and what to check, or ""."""
    own = next((one for one in graph.own_backwards if one.fault is BackwardFault.UNREAD), None)
    if own is None or arranged.data * arranged.microbatches == 1:
        return ""
    return (
        f"{own.name} ({own.where.rpartition('/')[2]}) cannot be traced: {own.why.rstrip('.')}. It "
        "gets the gradients of one microbatch of one data rank. This trains as on one device if "
        "the gradient of each row depends on that row alone, not on other rows or on their number, "
        "and that of a weight is a sum over rows; else pin dp=1 and a microbatch of all rows."
    )


def takes_whole_gradients(graph: Graph, arranged: Arrangement) -> bool:
    """Whether a script has gradients as large as on one device during the backward.

    Usually data ranks average gradients, each of which is as many times as large, so to clip one
    would be another training. Local steps and fp16 scale gradients themselves.
    """
    if arranged.data == 1 or arranged.is_local or arranged.precision.scales_loss:
        return False
    return bool(graph.own_backwards) or any(graph.unread_changes)


def _gradient_declared(name: str, field: str, value: Any, text: str, why: str) -> Declared:
    return Declared(place=f"gradients {name}", field=field, value=value, text=text, origin=why)


def completed(constraints: Constraints, cluster: Cluster, graph: Graph) -> Constraints:
    """Return the constraints with a global batch, and without plans that the model rules out."""
    constraints = with_own_gradients(constraints, graph)
    constraints = with_whole_batch(with_batch(constraints, cluster, graph), graph)
    check_lone_rows(constraints, graph)
    return with_local_steps(with_whole_scalars(constraints, graph), graph)


_AVERAGED = ("running_mean", "running_var", "num_batches_tracked")


def with_local_steps(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints without local steps, if the model writes buffers of its own.

    An outer step averages parameters and running statistics of norms, but no other buffers.
    """
    own = (one.name for one in graph.buffers if one.updated and not one.name.endswith(_AVERAGED))
    written = next(own, None)
    if written is None or local_steps(constraints) == (1,):
        return constraints
    if 1 not in local_steps(constraints):
        raise InfeasibleError(
            f"local steps would leave the buffer {written} different on each replica",
            expected="a model that writes no buffers but running statistics of norms",
            fix="leave out --sync-every",
        )
    allowed = tuple(one for one in constraints.allowed if one is not Allowed.LOCAL_STEPS)
    return replace(constraints, allowed=allowed, sync_every=None)


def with_batch(constraints: Constraints, cluster: Cluster, graph: Graph) -> Constraints:
    """Return the constraints with a global batch: the declared one, or the usual one.

    The usual one is rounded up to a multiple of the pinned microbatch times the fewest data ranks
    that pins and limits allow.
    """
    if constraints.global_batch is not None:
        return constraints
    # the graph then cannot show whether rows depend on each other: the batch stays whole
    if graph.fixed_batch is not None:
        return replace(constraints, global_batch=graph.fixed_batch * (constraints.data or 1))
    at_once = _least_data(constraints, cluster.size) * (constraints.microbatch or 1)
    rows = default_batch(cluster.size, graph.tokens_per_row)
    return replace(constraints, global_batch=ceil(rows / at_once) * at_once)


def default_batch(devices: int, tokens_per_row: int) -> int:
    """Return the usual number of rows of a step on this number of devices.

    It is a multiple of the number of devices, so that they can share it evenly. With more devices
    than rows, it is a multiple of a divisor of the number of devices: the largest one that is not
    above the rows.
    """
    limits = _TOKENS_OF_A_STEP if tokens_per_row > 1 else _ROWS_OF_A_STEP
    few, many = (max(1, limit // tokens_per_row) for limit in limits)
    rows = min(_ROWS_PER_DEVICE * devices, max(few, min(devices, many)))
    shared_by = next(one for one in range(rows, 0, -1) if devices % one == 0)
    return rows // shared_by * shared_by


def _least_data(constraints: Constraints, devices: int) -> int:
    """Return the fewest data ranks that pins and limits allow."""
    if constraints.data is not None:
        return constraints.data
    pipeline = constraints.pipeline or constraints.max_pipeline or devices
    tensor = constraints.tensor or constraints.max_tensor or devices
    return max(1, devices // (pipeline * tensor))


def without_recompute(
    constraints: Constraints, modules: Iterable[str], *, origin: str
) -> Constraints | None:
    """Return the constraints with recompute none for these modules; None if a rule forbids that."""
    added = []
    for path in modules:
        modes = [pin.mode for pin in constraints.recompute if covers(pin.modules, path)]
        if modes and modes[-1].wraps_layers:
            return None
        rule = RecomputePin(modules=path, mode=Recompute.NONE)
        text = f"recompute none in {path}"
        place = f"recompute {path}"
        added.append(Declared(place=place, field="recompute", value=rule, text=text, origin=origin))
    return constraints_of((*constraints.declared, *added))
