"""Counts the microbatches whose activations a stage holds at once, by closed form.

A microbatch is in flight on a stage from its forward until its backward ends, or its weight
gradient where the backward is split: torch keeps the whole graph from the first half to the second,
and beside it the gradients of the results of ops with weights (deferred). A rank computes one
action at a time, so the counts follow from its order alone, whatever the actions cost.
"""


def gpipe_in_flight(microbatches: int) -> int:
    """Return m: every stage holds every microbatch between the two phases."""
    return microbatches


def one_f_one_b_in_flight(stage: int, *, stages: int, microbatches: int) -> int:
    """Return min(m, p − stage): one for the stage and one for each stage after it."""
    return min(microbatches, stages - stage)


def interleaved_in_flight(
    stage: int, *, ranks: int, stages_per_rank: int, microbatches: int, per_round: int
) -> int:
    """Return the peak of one stage of interleaved 1F1B; see `_peak_in_rounds`."""
    warmup = (stages_per_rank - 1) * per_round + 2 * (ranks - 1 - stage % ranks)
    return _peak_in_rounds(
        stage // ranks,
        chunks=stages_per_rank,
        microbatches=microbatches,
        per_round=per_round,
        warmup=warmup,
        delay=0,
    )


def interleaved_zero_bubble_in_flight(
    stage: int, *, ranks: int, stages_per_rank: int, microbatches: int, per_round: int
) -> int:
    """Return the peak of one stage of interleaved zero bubble; min(m, p) with one per rank."""
    rank = stage % ranks
    return _peak_in_rounds(
        stage // ranks,
        chunks=stages_per_rank,
        microbatches=microbatches,
        per_round=per_round,
        warmup=(stages_per_rank - 1) * per_round + ranks - 1 - rank,
        delay=rank,
    )


def zero_bubble_v_in_flight(stage: int, *, ranks: int, microbatches: int) -> int:
    """Return min(m, 2p − r) for rank r's stage on the way down, min(m, r + 1) on the way up."""
    going_down = stage < ranks
    rank = stage if going_down else 2 * ranks - 1 - stage
    return min(microbatches, 2 * ranks - rank if going_down else rank + 1)


def _peak_in_rounds(
    chunk: int, *, chunks: int, microbatches: int, per_round: int, warmup: int, delay: int
) -> int:
    """Return the peak of a rank's chunk-th stage when its stages take turns of a round each.

    After forward number w + i (w of warm-up) the rank has released max(0, i − delay) microbatches:

        in flight = F(w + i + 1) − R(max(0, i − delay))

    where F(n) and R(n) count how many of the first n forwards (releases) are this stage's. Both
    grow by one per step inside the stage's turns and stand still outside, so the difference is
    greatest when a turn of forwards has just ended, one of releases is about to begin, or at the
    ends.
    """
    period, total = chunks * per_round, chunks * microbatches
    warmup = min(warmup, total)
    if warmup == total:
        return microbatches  # every forward comes before the first release

    def forwards(count: int) -> int:
        return _of_this_turn(count, chunk * per_round, per_round, period)

    def releases(count: int) -> int:
        return _of_this_turn(count, (chunks - 1 - chunk) * per_round, per_round, period)

    last = total - warmup - 1
    turning_points = {0, last, delay}
    for start in range(0, total + period, period):
        turning_points.add(start + (chunk + 1) * per_round - warmup - 1)
        turning_points.add(start + (chunks - 1 - chunk) * per_round + delay)
    return max(
        forwards(warmup + index + 1) - releases(max(0, index - delay))
        for index in turning_points
        if 0 <= index <= last
    )


def _of_this_turn(count: int, turn_begins: int, per_round: int, period: int) -> int:
    """Return how many of the first `count` actions fall in the turn that each period has."""
    periods, rest = divmod(count, period)
    return periods * per_round + min(max(rest - turn_begins, 0), per_round)
