"""The cells of the equality matrix: models of the zoo, and kinds of plans for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.costs.prediction import Offload, Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from tests.codegen.padding import Padding

GLOBAL_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model of the zoo, without dropout, and the axes that its tensor parallelism splits."""

    file: str
    arguments: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # inside attention and feed-forward, or the channels
    sequence: tuple[str, ...] = ()  # outside of these
    vocabulary: tuple[str, ...] = ()
    padding: Padding = Padding.ANY
    blocks: tuple[str, ...] = ("layers.*",)  # the modules that are recomputed where layers are


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of plan: degrees, the axes that are split, and what else is pinned."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    splits: tuple[str, ...] = ()  # fields of Subject; an op takes the first that it can
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    stages_per_rank: int = 1
    zero: Zero = Zero.NONE
    shard: int | None = None
    recompute: Recompute = Recompute.NONE
    offload: Offload = Offload.NONE

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        return self.pipeline * self.data * self.tensor

    @property
    def stages(self) -> int:
        """Into how many stages the layers are cut."""
        return self.pipeline * self.stages_per_rank

    @property
    def microbatch(self) -> int:
        """Rows: each data rank accumulates over two microbatches, or fills a pipeline with four."""
        return GLOBAL_BATCH // self.data // (4 if self.pipeline > 1 else 2)


STILL = ("dropout=0.0",)
SUBJECTS: Mapping[str, Subject] = {
    "gpt2": Subject(
        file="gpt2.py",
        blocks=("h.*",),
        arguments=STILL,
        inner=("heads", "ffn"),
        sequence=("seq",),
        vocabulary=("vocab",),
    ),
    "gpt2 uneven": Subject(  # sizes that no degree divides
        file="gpt2.py",
        blocks=("h.*",),
        arguments=(*STILL, "heads=3", "dim=42", "ffn=101", "vocab_size=83"),
        inner=("heads", "ffn"),
        sequence=("seq",),
        vocabulary=("vocab",),
    ),
    "llama": Subject(
        file="llama.py", inner=("kv_heads", "ffn"), sequence=("seq",), vocabulary=("vocab",)
    ),
    "bert": Subject(
        file="bert.py",
        arguments=STILL,
        inner=("heads", "ffn"),
        sequence=("seq",),
        vocabulary=("vocab",),
    ),
    "t5": Subject(
        file="t5.py",
        blocks=("encoder.*", "decoder.*"),
        arguments=STILL,
        inner=("heads", "ffn"),
        sequence=("seq", "seq_2"),
        vocabulary=("vocab",),
        padding=Padding.LAST,
    ),
    "vit": Subject(file="vit.py", arguments=STILL, inner=("heads", "ffn")),
    "resnet": Subject(
        file="resnet.py",
        blocks=("blocks.*",),
        inner=("channels_2", "channels_3", "channels_4"),
        padding=Padding.NONE,
    ),
    "mnist": Subject(file="mnist.py", arguments=("layers=5",), inner=("64",), blocks=("hidden.*",)),
    "intent": Subject(file="intent.py", inner=("32",), blocks=()),
    "transformer_lm": Subject(
        file="transformer_lm.py",
        arguments=STILL,
        inner=("heads", "128"),
        sequence=("seq",),
        vocabulary=("vocab",),
    ),
}

_GPIPE, _1F1B = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B
_INTERLEAVED, _IZB = ScheduleKind.INTERLEAVED_1F1B, ScheduleKind.INTERLEAVED_ZERO_BUBBLE
_ZBV = ScheduleKind.ZERO_BUBBLE_V
_INNER = ("inner",)
_SEQUENCE = ("inner", "vocabulary", "sequence")
_VOCABULARY = ("vocabulary",)
_ALL = ("vocabulary", "inner")

KINDS: Mapping[str, Kind] = {
    "ddp 2": Kind(data=2),
    "ddp 4": Kind(data=4),
    "ddp 8": Kind(data=8),
    "zero-1 2": Kind(data=2, zero=Zero.OPTIMIZER),
    "zero-1 4": Kind(data=4, zero=Zero.OPTIMIZER),
    "zero-2 2": Kind(data=2, zero=Zero.GRADIENTS),
    "zero-2 4": Kind(data=4, zero=Zero.GRADIENTS),
    "zero-3 2": Kind(data=2, zero=Zero.PARAMETERS),
    "zero-3 4": Kind(data=4, zero=Zero.PARAMETERS),
    "hsdp zero-1 4": Kind(data=4, zero=Zero.OPTIMIZER, shard=2),
    "hsdp zero-2 4": Kind(data=4, zero=Zero.GRADIENTS, shard=2),
    "hsdp zero-3 4": Kind(data=4, zero=Zero.PARAMETERS, shard=2),
    "hsdp zero-3 8": Kind(data=8, zero=Zero.PARAMETERS, shard=4),
    "tp 2": Kind(tensor=2, splits=_INNER),
    "tp 4": Kind(tensor=4, splits=_INNER),
    "tp+sp 2": Kind(tensor=2, splits=_SEQUENCE),
    "tp+sp 4": Kind(tensor=4, splits=_SEQUENCE),
    "chosen tp 2": Kind(tensor=2),
    "chosen tp 4": Kind(tensor=4),
    "sp 2": Kind(tensor=2, splits=("sequence",)),
    "vocabulary 2": Kind(tensor=2, splits=_VOCABULARY),
    "vocabulary 4": Kind(tensor=4, splits=_VOCABULARY),
    "pp gpipe 2": Kind(pipeline=2, schedule=_GPIPE),
    "pp 1f1b 2": Kind(pipeline=2),
    "pp 1f1b 4": Kind(pipeline=4),
    "pp interleaved-1f1b 2": Kind(pipeline=2, schedule=_INTERLEAVED, stages_per_rank=2),
    "pp interleaved-zb 2": Kind(pipeline=2, schedule=_IZB, stages_per_rank=2),
    "pp zb 2": Kind(pipeline=2, schedule=_IZB),
    "pp zero-bubble-v 2": Kind(pipeline=2, schedule=_ZBV, stages_per_rank=2),
    "tp×pp 4": Kind(pipeline=2, tensor=2, splits=_ALL),
    "tp+sp×pp 4": Kind(pipeline=2, tensor=2, splits=_SEQUENCE),
    "tp×pp interleaved 4": Kind(
        pipeline=2, tensor=2, splits=_ALL, schedule=_INTERLEAVED, stages_per_rank=2
    ),
    "tp+sp×pp zero-bubble-v 4": Kind(
        pipeline=2, tensor=2, splits=_SEQUENCE, schedule=_ZBV, stages_per_rank=2
    ),
    "dp×tp 4": Kind(data=2, tensor=2, splits=_ALL),
    "dp×tp+sp 4": Kind(data=2, tensor=2, splits=_SEQUENCE),
    "dp×tp 8": Kind(data=4, tensor=2, splits=_INNER),
    "dp×pp 4": Kind(data=2, pipeline=2),
    "dp×pp interleaved 4": Kind(data=2, pipeline=2, schedule=_INTERLEAVED, stages_per_rank=2),
    "dp×pp zero-bubble-v 4": Kind(data=2, pipeline=2, schedule=_ZBV, stages_per_rank=2),
    "zero-1×pp 4": Kind(data=2, pipeline=2, zero=Zero.OPTIMIZER),
    "zero-2×pp 4": Kind(data=2, pipeline=2, zero=Zero.GRADIENTS),
    "zero-3×pp 4": Kind(data=2, pipeline=2, zero=Zero.PARAMETERS),
    "zero-1×pp zero-bubble-v 4": Kind(
        data=2, pipeline=2, zero=Zero.OPTIMIZER, schedule=_ZBV, stages_per_rank=2
    ),
    "zero-3×pp interleaved 4": Kind(
        data=2, pipeline=2, zero=Zero.PARAMETERS, schedule=_INTERLEAVED, stages_per_rank=2
    ),
    "zero-1×tp 4": Kind(data=2, tensor=2, splits=_ALL, zero=Zero.OPTIMIZER),
    "zero-3×tp+sp 4": Kind(data=2, tensor=2, splits=_SEQUENCE, zero=Zero.PARAMETERS),
    "dp×tp×pp 8": Kind(data=2, tensor=2, pipeline=2, splits=_ALL),
    "zero-1×tp×pp 8": Kind(data=2, tensor=2, pipeline=2, splits=_ALL, zero=Zero.OPTIMIZER),
    "zero-2×tp×pp 8": Kind(data=2, tensor=2, pipeline=2, splits=_ALL, zero=Zero.GRADIENTS),
    "zero-3×tp+sp×pp 8": Kind(data=2, tensor=2, pipeline=2, splits=_SEQUENCE, zero=Zero.PARAMETERS),
    "selective ddp 2": Kind(data=2, recompute=Recompute.SELECTIVE),
    "full ddp 2": Kind(data=2, recompute=Recompute.FULL),
    "selective zero-3 2": Kind(data=2, zero=Zero.PARAMETERS, recompute=Recompute.SELECTIVE),
    "full zero-3 2": Kind(data=2, zero=Zero.PARAMETERS, recompute=Recompute.FULL),
    "selective tp+sp 2": Kind(tensor=2, splits=_SEQUENCE, recompute=Recompute.SELECTIVE),
    "full tp+sp 2": Kind(tensor=2, splits=_SEQUENCE, recompute=Recompute.FULL),
    "selective pp 2": Kind(pipeline=2, recompute=Recompute.SELECTIVE),
    "full pp zero-bubble-v 2": Kind(
        pipeline=2, schedule=_ZBV, stages_per_rank=2, recompute=Recompute.FULL
    ),
    "full dp×tp×pp 8": Kind(data=2, tensor=2, pipeline=2, splits=_ALL, recompute=Recompute.FULL),
    "host zero-3 1": Kind(zero=Zero.PARAMETERS, offload=Offload.OPTIMIZER),
    "host ddp 2": Kind(data=2, offload=Offload.OPTIMIZER),
    "host zero-1 2": Kind(data=2, zero=Zero.OPTIMIZER, offload=Offload.OPTIMIZER),
    "host zero-2 2": Kind(data=2, zero=Zero.GRADIENTS, offload=Offload.OPTIMIZER),
    "host zero-3 2": Kind(data=2, zero=Zero.PARAMETERS, offload=Offload.OPTIMIZER),
    "host tp+sp 2": Kind(tensor=2, splits=_SEQUENCE, offload=Offload.OPTIMIZER),
    "host pp 2": Kind(pipeline=2, offload=Offload.OPTIMIZER),
    "host zero-1×pp 4": Kind(data=2, pipeline=2, zero=Zero.OPTIMIZER, offload=Offload.OPTIMIZER),
    "host zero-3×tp+sp×pp 8": Kind(
        data=2,
        tensor=2,
        pipeline=2,
        splits=_SEQUENCE,
        zero=Zero.PARAMETERS,
        offload=Offload.OPTIMIZER,
    ),
    "saved there ddp 2": Kind(data=2, recompute=Recompute.HOST),
    "saved there zero-3 2": Kind(data=2, zero=Zero.PARAMETERS, recompute=Recompute.HOST),
    "saved there tp+sp 2": Kind(tensor=2, splits=_SEQUENCE, recompute=Recompute.HOST),
    "saved there pp 2": Kind(pipeline=2, recompute=Recompute.HOST),
    "saved there pp interleaved-1f1b 2": Kind(
        pipeline=2, schedule=_INTERLEAVED, stages_per_rank=2, recompute=Recompute.HOST
    ),
    "saved there pp zero-bubble-v 2": Kind(
        pipeline=2, schedule=_ZBV, stages_per_rank=2, recompute=Recompute.HOST
    ),
    "inputs there ddp 2": Kind(data=2, recompute=Recompute.FULL_HOST),
    "inputs there zero-3 2": Kind(data=2, zero=Zero.PARAMETERS, recompute=Recompute.FULL_HOST),
    "inputs there tp+sp 2": Kind(tensor=2, splits=_SEQUENCE, recompute=Recompute.FULL_HOST),
    "inputs there pp 2": Kind(pipeline=2, recompute=Recompute.FULL_HOST),
    "all there zero-3×tp+sp×pp 8": Kind(
        data=2,
        tensor=2,
        pipeline=2,
        splits=_SEQUENCE,
        zero=Zero.PARAMETERS,
        recompute=Recompute.HOST,
        offload=Offload.OPTIMIZER,
    ),
}


# What the planner has to refuse, with what it says.
_NOTHING_RUNS = "no arrangement can run the model"
REFUSED: Mapping[tuple[str, str], str] = {
    # two layers make no more than two stages
    **{("intent", kind): _NOTHING_RUNS for kind, own in KINDS.items() if own.stages > 2}
}


def axes_of(subject: Subject, kind: Kind, *, last: bool = False) -> tuple[str, ...]:
    """Return the axes that a plan of this kind splits in a model, or the last of them."""
    named = kind.splits[-1:] if last else kind.splits
    return tuple(axis for which in named for axis in getattr(subject, which))


def is_applicable(model: str, kind: str) -> bool:
    """Whether a model has what makes a plan of this kind: blocks, the last axes that it names."""
    subject, own = SUBJECTS[model], KINDS[kind]
    has_axes = all(getattr(subject, which) for which in own.splits[-1:])
    return has_axes and (bool(subject.blocks) or own.recompute is Recompute.NONE)
