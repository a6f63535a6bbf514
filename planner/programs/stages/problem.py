"""What the stage program is asked: layers and their options, cuts, pins, and what a stage may hold.

All times are seconds and all memory is bytes. A *layer class* is a number; equal consecutive layers
are one run. Stage p of a pipeline lives on rank p mod R (R ranks), or on the way back up, in the
V shape, on rank R − 1 − p mod R for every odd round.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autopar.planner.errors import gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOption:
    """One way to run one layer: a recompute mode, a layout, or both."""

    name: str
    seconds: float  # forward and backward of one microbatch
    step_seconds: float = 0.0  # once per step: optimizer, gradient sums that nothing hides
    fixed_bytes: int = 0  # weights, gradients, optimizer state
    saved_bytes: int = 0  # kept for every microbatch in flight
    deferred_bytes: int = 0  # beside these, for every one between the halves of its backward
    transient_bytes: int = 0  # while the layer runs; layers run one after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Equal consecutive layers."""

    layer_class: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The boundary between two layers: what a stage that begins or ends there pays per microbatch.

    Activations arrive at the stage that begins there, their gradients at the one that ends there.
    """

    beginning_seconds: float = 0.0
    ending_seconds: float = 0.0
    is_allowed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A layer that must be on a given stage."""

    layer: int
    stage: int


Options = tuple[LayerOption, ...]


@dataclass(frozen=True, kw_only=True)  # no slots: cached properties need a place
class LayerChoices:
    """A sequence of layers, and how each may be run on each kind of device.

    `options[d][c]` are the options of layer class c on device class d. The same option is at the
    same position on every device class; the simplest comes first and wins ties.
    """

    options: tuple[tuple[Options, ...], ...]
    runs: tuple[LayerRun, ...]
    cuts: tuple[Cut, ...] = ()  # between layers l and l + 1; empty: all free and allowed
    pins: tuple[Pin, ...] = ()

    def __post_init__(self) -> None:
        faults = [*_option_faults(self), *_sequence_faults(self)]
        if faults:
            raise gathered(faults, where="the layers given to the stage program")

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The class of each layer in turn."""
        return tuple(run.layer_class for run in self.runs for _ in range(run.count))

    @cached_property
    def boundaries(self) -> tuple[Cut, ...]:
        """The boundaries 0 … n: before the first layer, the cuts, after the last layer."""
        edge = Cut()
        inner = self.cuts or (edge,) * (len(self.layers) - 1)
        return (edge, *inner, edge)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """What one stage may use, and on which kind of device it runs."""

    memory_bytes: int  # of the rank, whichever stages it holds
    in_flight: int = 1  # microbatches whose saved tensors it holds at once
    deferred: int = 0  # of these, how many are between the halves of their backward
    device_class: int = 0
    cut_scale: float = 1.0  # factor on the cut before it: a boundary that crosses nodes costs more

    def resident_bytes(self, option: LayerOption) -> int:
        """Return what stays in its memory of a layer: fixed + K · saved + D · deferred."""
        flying = self.in_flight * option.saved_bytes + self.deferred * option.deferred_bytes
        return option.fixed_bytes + flying


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """The pipeline that the layers are laid on."""

    stages: tuple[StageLimit, ...]
    microbatches: int
    stages_per_rank: int = 1
    is_v_shaped: bool = False

    def __post_init__(self) -> None:
        faults = list(_limit_faults(self))
        if faults:
            raise gathered(faults, where="the pipeline given to the stage program")

    @property
    def ranks(self) -> int:
        """The ranks of the pipeline."""
        return len(self.stages) // self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        turn, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.is_v_shaped and turn % 2 else rank

    def round_of(self, stage: int) -> int:
        """Return which of the rank's stages this is: one round is one stage of every rank."""
        return stage // self.ranks


def boundary_windows(choices: LayerChoices, stages: int) -> tuple[tuple[int, int], ...]:
    """Return for the start of each stage, and the end of the last, the first and last legal place.

    No stage is empty, and a pin l → s says that s starts at l or before, and s + 1 after l; all
    other starts follow from these, one layer per stage at least. Empty windows: a contradiction.
    """
    count = len(choices.layers)
    first = [0] * (stages + 1)
    last = [count] * (stages + 1)
    last[0], first[stages] = 0, count
    for pin in choices.pins:
        if pin.stage >= stages:
            return ((0, -1),) * (stages + 1)
        last[pin.stage] = min(last[pin.stage], pin.layer)
        first[pin.stage + 1] = max(first[pin.stage + 1], pin.layer + 1)
    first = list(accumulate(first, lambda before, own: max(before + 1, own)))
    last = list(accumulate(reversed(last), lambda after, own: min(after - 1, own)))[::-1]
    return tuple(zip(first, last, strict=True))


def _option_faults(choices: LayerChoices) -> list[str]:
    faults = []
    names = [tuple(tuple(o.name for o in group) for group in table) for table in choices.options]
    if not names or any(table != names[0] for table in names):
        faults.append("every device class must offer the same options in the same order")
    for table in choices.options:
        for group in table:
            if not group:
                faults.append("a layer class has no option")
            faults += [
                f"option {option.name}: seconds and bytes must be finite and at least 0"
                for option in group
                if not _is_sane(option)
            ]
    return faults


def _is_sane(option: LayerOption) -> bool:
    amounts = (
        option.seconds,
        option.step_seconds,
        option.fixed_bytes,
        option.saved_bytes,
        option.deferred_bytes,
        option.transient_bytes,
    )
    return all(0 <= amount < float("inf") for amount in amounts)


def _sequence_faults(choices: LayerChoices) -> list[str]:
    faults = []
    classes = len(choices.options[0]) if choices.options else 0
    count = sum(run.count for run in choices.runs)
    if count < 1 or any(run.count < 0 for run in choices.runs):
        faults.append("there must be at least one layer, and no run of less than none")
    if any(not 0 <= run.layer_class < classes for run in choices.runs):
        faults.append(f"a run names a layer class that is not among the {classes} given")
    if choices.cuts and len(choices.cuts) != count - 1:
        faults.append(f"{count} layers have {count - 1} cuts between them, not {len(choices.cuts)}")
    faults += [
        f"a pin names layer {pin.layer} and stage {pin.stage}; there are {count} layers"
        for pin in choices.pins
        if not 0 <= pin.layer < count or pin.stage < 0
    ]
    return faults


def _limit_faults(limits: StageLimits) -> list[str]:
    faults = []
    if limits.microbatches < 1 or limits.stages_per_rank < 1 or not limits.stages:
        faults.append("microbatches, stages and stages per rank must be at least 1")
    elif len(limits.stages) % limits.stages_per_rank:
        faults.append(
            f"{len(limits.stages)} stages do not fill ranks of {limits.stages_per_rank} stages"
        )
    else:
        memory = {(limits.rank_of(p), stage.memory_bytes) for p, stage in enumerate(limits.stages)}
        if len(memory) > limits.ranks:
            faults.append("stages of one rank must give the same memory: the rank's")
    return faults
