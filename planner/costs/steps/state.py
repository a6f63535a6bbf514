"""Sums what a rank holds throughout a step: parameters, gradients, optimizer states.

ZeRO divides them between the shard ranks, and offload moves them to the host's memory. Also tells
when ZeRO saves no memory, and when no rank can keep the errors of compression.
"""

from __future__ import annotations

from math import ceil

from autopar.planner.costs.prediction import Arrangement, RankParameters, State
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.overlap import LayerLoad


def float8_parts(arrangement: Arrangement) -> int:
    """Return from how many parts ZeRO-3 gathers the weights of float8 products in float8.

    0 if it gathers them as they are, because they come from the host or have other scales.
    """
    is_here = arrangement.divided.divides_parameters and not arrangement.shards_on_host
    return arrangement.shard if arrangement.float8.gathers and is_here else 0


def float8_elements(load: RankParameters | LayerLoad, parts: int) -> int:
    """Return the elements that are gathered in float8: of weights whose rows the parts divide."""
    return sum(size for rows, size in load.float8_weights if parts and rows % parts == 0)


def gathered_bytes(load: RankParameters | LayerLoad, *, float8_parts: int) -> float:
    """Return the bytes of parameters as they are gathered; an element in float8 saves one byte."""
    return load.parameter_bytes - float8_elements(load, float8_parts)


def reduced_state_bytes(totals: State, arrangement: Arrangement) -> int:
    """Return the bytes of parameters, gradients and states when all gradients have been reduced."""
    lasting = _lasting_gradient_bytes(totals.gradient_bytes, arrangement)
    stays = not arrangement.offload.has_states
    reduced = stays * own_part(totals.gradient_bytes, arrangement)
    return state_bytes(totals, arrangement) - lasting + max(lasting, reduced)


def state_bytes(totals: State, arrangement: Arrangement) -> int:
    """Return the bytes of parameters, gradients and states on a rank, as ZeRO divides them."""
    return sum(state_by_category(totals, arrangement))


def host_bytes(totals: State, arrangement: Arrangement) -> int:
    """Return what a rank has in the host's memory.

        this rank's part of (states + fp32 weights + gradients)

    With 16-bit weights, states include the fp32 weights. fully_shard has its parts of frozen
    parameters there, too. Without fully_shard, the gradients of several microbatches are added on
    the host, and arriving ones take up to 32 MiB more. If only the outer optimizer is on the host,
    this is its state.
    """
    if arrangement.offload.has_outer:
        size_bytes = ceil(_outer_copies(arrangement) * totals.gradient_bytes)
        return _part(size_bytes, arrangement.optimizer_ranks, is_divided=True)
    if not arrangement.offload.has_states:
        return 0
    states = totals.optimizer_bytes + totals.gradient_bytes
    if arrangement.shards_on_host:
        states += _sharded_bytes(totals.parameter_bytes, totals.trainable, arrangement)
    else:
        states += totals.gradient_bytes * (not arrangement.precision.is_half)
        if arrangement.microbatches > 1:
            states += min(totals.gradient_bytes, _ARRIVING_BYTES * arrangement.optimizer_ranks)
    return _part(states, arrangement.optimizer_ranks, is_divided=True)


_ARRIVING_BYTES = 32 * 2**20  # runtime/ranks/transport.py adds gradients in pieces of this size


def state_by_category(totals: State, arrangement: Arrangement) -> tuple[int, int, int]:
    """Return parameters, gradients and optimizer states, as ZeRO divides them."""
    return (
        _parameter_bytes(totals.parameter_bytes, totals.trainable, arrangement),
        _lasting_gradient_bytes(totals.gradient_bytes, arrangement),
        _optimizer_bytes(totals.optimizer_bytes, totals.gradient_bytes, arrangement),
    )


def _optimizer_bytes(size_bytes: int, gradient_bytes: int, arrangement: Arrangement) -> int:
    """Return the bytes of the optimizer's and the outer optimizer's states on the device.

    Outer states are fp32, as gradients are. Even if they are on the host, the device has the change
    of the part of the model that is being sent.
    """
    outer = 0 if arrangement.offload.has_outer else _outer_copies(arrangement)
    size_bytes += ceil((outer + _share_on_its_way(arrangement)) * gradient_bytes)
    is_here = not arrangement.offload.has_states
    return is_here * _part(size_bytes, arrangement.optimizer_ranks, is_divided=True)


def _outer_copies(arrangement: Arrangement) -> float:
    """Return how many fp32 copies of the parameters outer steps keep in one memory.

    These are the outer optimizer's states, and a copy of the part that is being sent, from before.
    """
    return arrangement.outer.copies + _share_on_its_way(arrangement)


def _share_on_its_way(arrangement: Arrangement) -> float:
    """Return the share of the model that is sent while replicas train on."""
    return 1 / arrangement.outer_parts if arrangement.outer_parts > 1 else 0.0


def _lasting_gradient_bytes(size_bytes: int, arrangement: Arrangement) -> int:
    """Return the gradients that are allocated during a forward.

    Earlier microbatches left them, or they lie in buckets, which stay allocated. None stay if they
    go to the host. The errors of compression count with them.
    """
    is_clear = arrangement.is_one_pass and not arrangement.keeps_buckets
    if is_clear or arrangement.offload.has_states:
        return 0
    lasting = _part(size_bytes, arrangement.shard, arrangement.divided.divides_gradients)
    return lasting + _lost_bytes(size_bytes, arrangement)


def _lost_bytes(size_bytes: int, arrangement: Arrangement) -> int:
    """Return the bytes of the errors of compression, which a rank adds to its next gradients.

        sent bytes + sent bytes ÷ the ranks that exchange pieces

    A rank sends all gradients, or its part of them if ZeRO-1 has copies. It also sends its piece of
    the mean to the others, unless its optimizer alone needs this piece. PowerSGD only has the error
    of what a rank sends.
    """
    if not arrangement.compression.keeps_lost:
        return 0
    if arrangement.compression.is_low_rank:
        return size_bytes
    copies = arrangement.data // arrangement.optimizer_ranks
    own = _part(size_bytes, arrangement.optimizer_ranks, is_divided=copies > 1)
    return own + _part(own, copies, is_divided=True) * (copies > 1)


def _parameter_bytes(size_bytes: int, trainable: int, arrangement: Arrangement) -> int:
    """Return the parameters' bytes; ZeRO-2 and 3 keep fp32 parts, ZeRO-2 also gathered parameters.

    In 16 bits, the parts of trained parameters are the fp32 copy that counts with the optimizer. If
    a step is one pass, ZeRO-2 frees gathered layers one by one, and they count as unsharded.
    """
    if not arrangement.divided.shards_modules:
        return size_bytes
    parts = _sharded_bytes(size_bytes, trainable, arrangement)
    own = 0 if arrangement.shards_on_host else _part(parts, arrangement.shard, is_divided=True)
    stays_gathered = arrangement.zero.keeps_gathered and not arrangement.is_one_pass
    return size_bytes * stays_gathered + own


def _sharded_bytes(size_bytes: int, trainable: int, arrangement: Arrangement) -> int:
    """Return the bytes of parameters that fully_shard divides, without the optimizer's fp32 ones.

    It holds parameters in fp32. In 16-bit training, the trained ones count with the optimizer.
    """
    is_half = arrangement.precision.is_half
    return 2 * max(0, size_bytes - 2 * trainable) if is_half else size_bytes


def _part(size_bytes: int, ranks: int, is_divided: bool) -> int:
    return -(-size_bytes // ranks) if is_divided else size_bytes


def lasting_bytes(totals: State, arrangement: Arrangement) -> int:
    """Return what stages hold throughout a step: their state, and the sent copy of a bucket."""
    return state_bytes(totals, arrangement) + sent_bucket_bytes(totals, arrangement)


def sent_bucket_bytes(totals: State, arrangement: Arrangement) -> int:
    """Return the compressed copies of a bucket that ZeRO-0 and 1 send."""
    if not arrangement.has_buckets:
        return 0
    bucket = min(totals.gradient_bytes, arrangement.bucket_bytes)
    return int(bucket * arrangement.compression.buffer_share)


def own_part(gradient_bytes: int, arrangement: Arrangement) -> int:
    """Return what a rank keeps of gradients once they are reduced."""
    if arrangement.shards_on_host:
        return 0
    return _part(gradient_bytes, arrangement.shard, arrangement.divided.divides_gradients)


def loses_unkept(arrangement: Arrangement) -> bool:
    """Whether compression would make errors that no rank can keep for its next gradients.

    fully_shard and the host's memory take gradients in every backward, and no rank has them whole
    afterwards. In fp16 the loss scale changes from step to step, and errors with it. Replicas that
    take local steps would store their errors under the same names.
    """
    is_unkept = arrangement.reduces_each or arrangement.precision.scales_loss
    return arrangement.compression.keeps_lost and (is_unkept or arrangement.is_local)


def offloads_wrongly(arrangement: Arrangement) -> bool:
    """Whether a plan would have the wrong optimizer on the host.

    With local steps only the outer optimizer can be there; other plans have no outer optimizer.
    """
    offload = arrangement.offload
    return offload.has_states if arrangement.is_local else offload.has_outer


def shards_in_vain(arrangement: Arrangement) -> bool:
    """Whether fully_shard would need as much memory as ZeRO-1, because backwards are split.

    The halves of a split backward find parameters by their autograd nodes, which gathering changes.
    No hook sees gradients until the last microbatch is done. So both parameters and gradients stay
    whole.
    """
    splits = arrangement.pipeline > 1 and SCHEDULES[arrangement.schedule].splits_backward
    return splits and arrangement.zero.shards_modules
