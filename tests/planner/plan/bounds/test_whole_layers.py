"""Tests that whole layers find places exactly where some way to lay and run them is in time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.plan.bounds.bottleneck import Block, Mode, Room, StageRoom
from autopar.planner.plan.bounds.whole_layers import RankTime, find_places

MICROBATCHES = 4


def mode(seconds: int, saved_bytes: int, transient_bytes: int) -> Mode:
    """A way to run a layer, half of it forward."""
    return Mode(
        forward_seconds=seconds / 2,
        backward_seconds=seconds / 2,
        weight_gradient_seconds=0.0,
        saved_bytes=float(saved_bytes),
        transient_bytes=float(transient_bytes),
    )


def stage(in_flight: int, size_bytes: int, reserved_bytes: int) -> StageRoom:
    """A stage with its memory."""
    return StageRoom(in_flight=in_flight, size_bytes=size_bytes, reserved_bytes=reserved_bytes)


MODES = st.lists(
    st.builds(mode, st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=3
)
STAGES = st.builds(stage, st.integers(1, 3), st.integers(0, 60), st.integers(0, 5))
RANKS = st.lists(st.lists(STAGES, min_size=1, max_size=2), min_size=1, max_size=3)
TIMES = st.builds(
    lambda once, each: RankTime(once_seconds=once, each_seconds=each),
    st.integers(0, 20),
    st.integers(0, 5),
)


def seconds_of(room: Room, modes: list[Mode], ranks: list[StageRoom], count: int) -> float:
    """The least seconds of so many layers on one rank, by trying everything."""
    return min(_all_seconds(room, modes, ranks, count), default=float("inf"))


def _all_seconds(
    room: Room, modes: list[Mode], ranks: list[StageRoom], count: int
) -> Iterator[float]:
    for counts in product(range(count + 1), repeat=len(ranks)):
        if sum(counts) != count:
            continue
        ways = (combinations_with_replacement(modes, own) for own in counts)
        for used in product(*ways):
            if all(_fits(room, one, own) for one, own in zip(ranks, used, strict=True)):
                yield sum(mode.seconds for own in used for mode in own)


def _fits(room: Room, one: StageRoom, used: tuple[Mode, ...]) -> bool:
    if not used:
        return True
    held = sum(room.state_bytes + one.in_flight * mode.saved_bytes for mode in used)
    transient = max(mode.transient_bytes for mode in used) + room.unsharded_bytes
    return held + max(one.reserved_bytes, transient) <= one.size_bytes


@given(MODES, RANKS, st.data(), st.integers(1, 5), st.integers(1, 120))
def test_layers_find_places_where_brute_force_finds_them(
    modes: list[Mode], ranks: list[list[StageRoom]], data: st.DataObject, count: int, within: int
) -> None:
    times = data.draw(st.lists(TIMES, min_size=len(ranks), max_size=len(ranks)))
    room = Room(
        ranks=tuple(map(tuple, ranks)),
        state_bytes=3,
        unsharded_bytes=1,
        transient_bytes=0,
        margin=0.0,
    )
    block = Block(count=count, others=(), modes=tuple(modes), parameter_bytes=0, gradient_bytes=0)
    most = []
    for own, time in zip(ranks, times, strict=True):
        left = (within - time.once_seconds) / MICROBATCHES - time.each_seconds
        most.append(
            max(
                (n for n in range(count + 1) if seconds_of(room, modes, own, n) <= left), default=-1
            )
        )
    expected = min(most) >= 0 and sum(most) >= count
    found = find_places(block, room, times, microbatches=MICROBATCHES, within_seconds=float(within))
    assert found == expected
