"""Twelve kinds of models, four ways to lay each out, and what becomes of each pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.field.cells import Kind, Subject

GLOBAL_BATCH = 8
_FOLDER = Path(__file__).parent / "plain_models"
_MEET = "the rows of a batch meet"
_NEARLY = "multiplies two means over rows"
_APART = "takes the statistics of each of 2 microbatches separately"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a script trains: what one device does, or else what its note tells.

    rows: of those that have a loss, and statistics, of their own.
    """

    note: str = ""
    rows: int = GLOBAL_BATCH


EQUAL = Outcome()


def _file(name: str, *arguments: str) -> Subject:
    return Subject(path=_FOLDER / f"{name}.py", arguments=arguments, global_batch=GLOBAL_BATCH)


KINDS: Mapping[str, Subject] = MappingProxyType(
    {
        "U-Net": _file("unet"),
        "LSTM": _file("lstm_tagger"),
        "GAN": _file("gan"),
        "DLRM": _file("dlrm"),
        "DiT": _file("dit"),
        "two towers": _file("two_towers"),
        "masked experts": _file("masked_experts"),
        "Mixtral": _file("language", "kind=mixtral"),
        "LoRA": _file("lora"),
        "captioner": _file("language", "kind=captioner"),
        "nanoGPT": _file("language", "kind=nanogpt"),
        "Qwen3": _file("language", "kind=qwen3"),
    }
)

WAYS: Mapping[str, Kind] = MappingProxyType(
    {
        "dp": Kind(ranks=2, data=2, microbatch=2),
        "tp": Kind(ranks=2, tensor=2, microbatch=GLOBAL_BATCH),
        "pp": Kind(ranks=2, pipeline=2, microbatch=2),
        "dp tp": Kind(ranks=4, data=2, tensor=2, microbatch=2),
        "dp whole": Kind(ranks=2, data=2),
        "pp whole": Kind(ranks=2, pipeline=2),
        "dp tp whole": Kind(ranks=4, data=2, tensor=2),
    }
)

_IN_PARTS = dict.fromkeys(("dp", "tp", "pp", "dp tp"), EQUAL)

# Of each kind what becomes of it in each way; "whole" leaves the microbatch to the planner, which
# takes one of all rows where rows meet, or batch norms take statistics of them.
EXPECTED: Mapping[str, Mapping[str, Outcome]] = MappingProxyType(
    {
        "U-Net": {
            "dp whole": EQUAL,
            "tp": EQUAL,
            "pp whole": EQUAL,
            "dp tp whole": EQUAL,
            "dp": Outcome(note=_APART, rows=4),  # which data ranks share
        },
        "LSTM": _IN_PARTS,
        "GAN": _IN_PARTS,
        "DLRM": _IN_PARTS,
        "DiT": _IN_PARTS,
        "two towers": {
            "dp whole": Outcome(note=_MEET, rows=4),
            "tp": EQUAL,
            "pp whole": EQUAL,
            "dp tp whole": Outcome(note=_MEET, rows=4),
            "pp": Outcome(note=_MEET, rows=2),
        },
        "masked experts": _IN_PARTS,
        "Mixtral": {
            "dp": Outcome(note=_NEARLY, rows=2),
            "tp": EQUAL,
            "pp": Outcome(note=_NEARLY, rows=2),
            "dp tp": Outcome(note=_NEARLY, rows=2),
        },
        "LoRA": _IN_PARTS,
        "captioner": _IN_PARTS,
        "nanoGPT": _IN_PARTS,
        "Qwen3": _IN_PARTS,
    }
)
CELLS = tuple((kind, way) for kind, ways in EXPECTED.items() for way in ways)
