"""What the bounds need to know of layouts inside the layers: of one solution, or of any at least.

Layouts that nobody has solved yet take no less time than the fastest ones, and hold, send, update
and compute again no less than all of it, split evenly among the ranks of the tensor axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute
from autopar.planner.costs.steps.backward_memory import layer_unsharded_bytes
from autopar.planner.costs.steps.memory import layer_state_bytes
from autopar.planner.plan.bounds.bottleneck import Block, block, least_layer_seconds
from autopar.planner.plan.bounds.relaxed_memory import Ladder, ladder
from autopar.planner.plan.bounds.step import Ends, Totals

_DIVIDED = (  # among the ranks of the tensor axis, at most
    *("saved_bytes", "transient_bytes", "learning_bytes", "deferred_bytes", "output_bytes"),
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "parameters", "trainable"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What the bounds need to know of the layers in some layouts."""

    totals: Totals
    ladder: Ladder
    block: Block
    ends: Ends
    repeated: LayerCost  # one of the block's layers
    kinds: tuple[tuple[Modes, int], ...]  # of layers, each with its number

    def state_bytes(self, arrangement: Arrangement) -> int:
        """Return the state of all layers, as ZeRO divides it."""
        return sum(
            number * layer_state_bytes(modes[Recompute.NONE], arrangement)
            for modes, number in self.kinds
        )

    def least_alone_bytes(self, arrangement: Arrangement) -> int:
        """Return what some layer needs at least, were it alone on its rank."""
        return max(_alone_bytes(modes, arrangement) for modes, _ in self.kinds)

    def transient_bytes(self, arrangement: Arrangement) -> int:
        """Return what every stage has at least, beside all that it keeps.

        The one of no pipeline has every layer in it. In the only backward of a step, all is kept
        while the last layer runs alone.
        """
        if arrangement.pipeline > 1:
            return 0
        if arrangement.is_one_pass:
            return self.ladder.last_transient_bytes
        return self.ladder.transient_bytes


def facts_of(row: Sequence[Modes]) -> LayoutFacts:
    """Return the facts of a row of layers, one object for equal ones."""
    numbers = Counter(map(id, row))
    kinds = {id(modes): modes for modes in row}
    repeated = kinds[max(numbers, key=lambda one: numbers[one])]
    return LayoutFacts(
        totals=_totals([modes[Recompute.NONE] for modes in row]),
        ladder=ladder(row),
        block=block(row),
        ends=_ends(row, repeated),
        repeated=repeated[Recompute.NONE],
        kinds=tuple((kinds[one], number) for one, number in numbers.items()),
    )


def of_any(fastest: Sequence[Modes], unsplit: Sequence[Modes], *, degree: int) -> tuple[Modes, ...]:
    """Return each layer as no layouts beat it, from the fastest ones and from one rank's."""
    known: dict[tuple[int, int], Modes] = {}
    row = []
    for own, whole in zip(fastest, unsplit, strict=True):
        key = id(own), id(whole)
        if key not in known:
            known[key] = {mode: _at_least(mode, own, whole, degree) for mode in own}
        row.append(known[key])
    return tuple(row)


def _at_least(mode: Recompute, fastest: Modes, unsplit: Modes, degree: int) -> LayerCost:
    own, whole, plain = fastest[mode], unsplit[mode], fastest[Recompute.NONE]
    again = min(_again_seconds(mode, fastest), _again_seconds(mode, unsplit) / degree)
    return replace(
        own,
        backward_seconds=plain.backward_seconds + max(0.0, again),
        **{name: min(getattr(own, name), getattr(whole, name) // degree) for name in _DIVIDED},
    )


def _again_seconds(mode: Recompute, modes: Modes) -> float:
    return modes[mode].backward_seconds - modes[Recompute.NONE].backward_seconds


def _alone_bytes(modes: Modes, arrangement: Arrangement) -> int:
    plain = modes[Recompute.NONE]
    held = layer_state_bytes(plain, arrangement) + layer_unsharded_bytes(plain, arrangement)
    return held + min(one.saved_bytes + one.transient_bytes for one in modes.values())


def _ends(row: Sequence[Modes], repeated: Modes) -> Ends:
    is_repeated = [modes is repeated for modes in row]
    leading, trailing = is_repeated.index(True), is_repeated[::-1].index(True)
    return Ends(
        leading=leading,
        trailing=trailing,
        between=is_repeated.count(False) - leading - trailing,
        first_seconds=least_layer_seconds(row[0]) if leading else 0.0,
        last_seconds=least_layer_seconds(row[-1]) if trailing else 0.0,
    )


def _totals(plain: Sequence[LayerCost]) -> Totals:
    return Totals(
        forward_seconds=sum(one.forward_seconds for one in plain),
        backward_seconds=sum(one.backward_seconds for one in plain),
        input_gradient_seconds=sum(
            one.backward_seconds - one.weight_gradient_seconds for one in plain
        ),
        parameter_bytes=sum(one.parameter_bytes for one in plain),
        gradient_bytes=sum(one.gradient_bytes for one in plain),
        trainable=sum(one.trainable for one in plain),
        least_output_bytes=min((one.output_bytes for one in plain[:-1]), default=0),
    )
