"""The cells of the field trial: subjects, and the demands with which each is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.layers import Compile
from autopar.planner.precision import Precision
from tests.field.families import TRIED
from tests.planner.subjects import ZOO

GLOBAL_BATCH = 8
MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model file of the trial, with its arguments."""

    path: Path
    arguments: tuple[str, ...] = ()
    global_batch: int = GLOBAL_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is demanded of a plan; None leaves the choice to the planner."""

    ranks: int
    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    zero: Zero | None = None
    microbatch: int | None = None
    precision: Precision = Precision.FP32
    recompute: Recompute | None = None  # of every layer
    schedule: ScheduleKind | None = None
    stages_per_rank: int | None = None
    split: str = ""  # the axis that tensor ranks split wherever they can
    compile: Compile = Compile.NONE


FAMILIES: Mapping[str, Subject] = {
    family.name: Subject(path=MODELS / "hugging_face.py", arguments=(f"family={family.name}",))
    for family in TRIED
}


def _gpt2(*arguments: str, global_batch: int = GLOBAL_BATCH) -> Subject:
    small = ("dropout=0.0", "seq_len=8", "layers=2", "dim=24", "heads=4", "vocab_size=60")
    changed = {argument.partition("=")[0] for argument in arguments}
    kept = tuple(one for one in small if one.partition("=")[0] not in changed)
    return Subject(path=ZOO / "gpt2.py", arguments=(*kept, *arguments), global_batch=global_batch)


def _own(name: str, *arguments: str) -> Subject:
    return Subject(path=MODELS / f"{name}.py", arguments=arguments)


AWKWARD: Mapping[str, Subject] = {
    "vocabulary 30522": _gpt2("vocab_size=30522", "dim=8", "heads=2"),
    "vocabulary 50257": _gpt2("vocab_size=50257", "dim=8", "heads=2"),
    "6 heads": _gpt2("heads=6"),
    "10 heads": _gpt2("heads=10", "dim=40"),
    "7 layers": _gpt2("layers=7"),
    "batch of 9": _gpt2(global_batch=9),
    "sequence of 13": _gpt2("seq_len=13"),
    "1 kv head": _gpt2("kv_heads=1"),
    "2 kv heads": _gpt2("kv_heads=2"),
    "one large layer": _own("one_large_layer"),
    "tied three ways": _own("tied_three_ways"),
    "shared parameters": _own("shared_parameters"),
    "frozen embedding": _own("frozen_embedding"),
    "frozen teacher": _own("frozen_teacher"),
    "silent teacher": _own("silent_teacher"),
    "several losses": _own("several_losses"),
    "dict": _own("outputs", "form=dict"),
    "tuple": _own("outputs", "form=tuple"),
    "dataclass": _own("outputs", "form=dataclass"),
    "arguments": _own("arguments"),
    "padded Llama": _own("padded_llama"),
    "summed loss": _own("losses", "kind=sum"),
    "masked loss": _own("losses", "kind=masked"),
    "class weights": _own("losses", "kind=classes"),
    "picked loss": _own("losses", "kind=picked"),
    "drawn noise": _own("drawn_noise"),
    "drawn rows": _own("drawn_rows"),
    "fourier": _own("fourier"),
    "steady buffers": _own("steady"),
    "in place": _own("in_place"),
    "writing layers": _own("writing_layers"),
    "odd modules": _own("odd_modules"),
    "siamese": _own("siamese"),
    "left behind": _own("left_behind"),
    "unread": _own("unread"),
    "adapters": _own("adapters"),
    "own choices": _own("own_choices"),
    "pairs": _own("pairs"),
    "views": _own("views"),
}

SUBJECTS: Mapping[str, Subject] = {**FAMILIES, **AWKWARD}

KINDS: Mapping[str, Kind] = {
    "free 2": Kind(ranks=2),
    "free 4": Kind(ranks=4),
    "dp 2": Kind(ranks=2, data=2, zero=Zero.NONE, microbatch=2),
    "dp 4": Kind(ranks=4, data=4, zero=Zero.NONE),
    "zero-1 2": Kind(ranks=2, data=2, zero=Zero.OPTIMIZER),
    "zero-3 2": Kind(ranks=2, data=2, zero=Zero.PARAMETERS, microbatch=2),
    "zero-3 4": Kind(ranks=4, data=4, zero=Zero.PARAMETERS),
    "pp 2": Kind(ranks=2, pipeline=2),
    "pp 4": Kind(ranks=4, pipeline=4),
    "tp 2": Kind(ranks=2, tensor=2),
    "tp 4": Kind(ranks=4, tensor=4),
    "rows over tp 2": Kind(ranks=2, tensor=2, split="batch"),
    "tp×pp 4": Kind(ranks=4, tensor=2, pipeline=2),
    "dp×tp 4": Kind(ranks=4, data=2, tensor=2),
    "full dp 2": Kind(ranks=2, data=2, zero=Zero.NONE, microbatch=2, recompute=Recompute.FULL),
    "full zero-3 2": Kind(
        ranks=2, data=2, zero=Zero.PARAMETERS, microbatch=2, recompute=Recompute.FULL
    ),
    "full pp 2": Kind(ranks=2, pipeline=2, recompute=Recompute.FULL),
    "selective tp 2": Kind(ranks=2, tensor=2, recompute=Recompute.SELECTIVE),
    "interleaved 2": Kind(
        ranks=2, pipeline=2, schedule=ScheduleKind.INTERLEAVED_1F1B, stages_per_rank=2
    ),
    "zero bubble 2": Kind(
        ranks=2, pipeline=2, schedule=ScheduleKind.ZERO_BUBBLE_V, stages_per_rank=2
    ),
    "dp bf16 2": Kind(ranks=2, data=2, precision=Precision.BF16),
    "pp bf16 2": Kind(ranks=2, pipeline=2, precision=Precision.BF16),
    "tp bf16 2": Kind(ranks=2, tensor=2, precision=Precision.BF16),
}
