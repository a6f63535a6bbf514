"""Compares what the ranks of a script hold, saw and drew with one process.

Ranks that hold the same elements may disagree, so each is compared by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from autopar.codegen.proof.draw_audit import Axes, draw_faults
from autopar.codegen.proof.draws import Draw
from autopar.codegen.proof.half_comparison import InHalf
from autopar.codegen.proof.held import Difference, Held, apart, begins_otherwise, largest_of
from autopar.codegen.proof.reference import Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrained:
    """What one rank saw, drew and holds; the losses are the same on every rank."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before each step clips them
    initial: Held  # parameters, buffers and plain tensors of modules, before the first step
    gradients: Held  # of the first step, clipped
    parameters: Held  # after the last, and buffers
    draws: tuple[Draw, ...]  # of one step more
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a script is from one process; `losses` are those of one process.

    `initial` is of what the script has before its first step: nothing may differ there.
    `faults` are sentences: what begins otherwise, what the script draws otherwise, or does not
    clip. `half` compares the same script in the plan's own 16 bits. `notes` tell what could not be
    compared, and why.
    """

    initial: Difference
    loss: Difference
    norm: Difference  # of all gradients, before they are clipped
    gradient: Difference
    parameter: Difference
    losses: tuple[float, ...]
    faults: tuple[str, ...]
    half: InHalf | None = None
    notes: tuple[str, ...] = ()

    def is_within(self, tolerance: float) -> bool:
        """Whether nothing differs by more; what is not a number differs."""
        differences = (self.loss, self.norm, self.gradient, self.parameter)
        is_equal = not self.faults and all(one.largest <= tolerance for one in differences)
        return is_equal and (self.half is None or self.half.is_as_near)


def compared(ranks: Sequence[RankTrained], expected: Trained, axes: Axes) -> Comparison:
    """Return how far the ranks of a script are from one process."""
    norms = [_by_step(rank.norms, expected.norms) for rank in ranks]
    initial = apart([rank.initial for rank in ranks], expected.initial)
    return Comparison(
        initial=largest_of(initial),
        loss=_by_step(ranks[0].losses, expected.losses),
        norm=max(norms, key=lambda one: (one.largest != one.largest, one.largest)),
        gradient=largest_of(apart([rank.gradients for rank in ranks], expected.gradients)),
        parameter=largest_of(apart([rank.parameters for rank in ranks], expected.parameters)),
        losses=expected.losses,
        faults=(
            *begins_otherwise(name for name, apart in initial.items() if apart != 0),
            *dict.fromkeys(fault for rank in ranks for fault in rank.faults),
            *draw_faults([rank.draws for rank in ranks], expected.draws, axes),
        ),
    )


def _by_step(found: Sequence[float], expected: Sequence[float]) -> Difference:
    """Return the largest difference among the steps; one that is missing differs by infinity."""
    return largest_of(
        {
            f"step {step}": float("inf") if None in (own, one) else abs(own - one)
            for step, (own, one) in enumerate(zip_longest(found, expected), start=1)
        }
    )
