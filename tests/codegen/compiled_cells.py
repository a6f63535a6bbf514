"""The cells of the compiled matrix: models, and kinds of plans whose layers are compiled."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.layers import Compile
from tests.field.cells import FAMILIES, Kind, Subject
from tests.planner.subjects import ZOO, ZOO_MODELS

_SHORT = dict.fromkeys(("gpt2", "llama", "bert", "t5", "vit", "transformer_lm"), ("layers=2",))
_FAMILIES = (
    "GPT-2", "Llama", "Qwen3", "Gemma2", "OPT", "GPT-NeoX", "BERT", "T5", "ViT", "ResNet",
    "Mixtral",
)  # fmt: skip

SUBJECTS: Mapping[str, Subject] = {
    **{
        name.removesuffix(".py"): Subject(
            path=ZOO / name, arguments=_SHORT.get(name.removesuffix(".py"), ())
        )
        for name in ZOO_MODELS
    },
    **{f"{name} (transformers)": FAMILIES[name] for name in _FAMILIES},
}
_LAYERS = Compile.LAYERS
KINDS: Mapping[str, Kind] = {
    "dp": Kind(ranks=2, data=2, zero=Zero.NONE, microbatch=2, compile=_LAYERS),
    "zero-1": Kind(ranks=2, data=2, zero=Zero.OPTIMIZER, microbatch=2, compile=_LAYERS),
    "zero-3": Kind(ranks=2, data=2, zero=Zero.PARAMETERS, microbatch=2, compile=_LAYERS),
    "tp": Kind(ranks=2, tensor=2, compile=_LAYERS),
    "tp+sp": Kind(ranks=2, tensor=2, split="seq", compile=_LAYERS),
    "pp": Kind(ranks=2, pipeline=2, microbatch=2, compile=_LAYERS),
    "tp×pp": Kind(ranks=4, tensor=2, pipeline=2, microbatch=4, compile=_LAYERS),
    "recomputed zero-3": Kind(
        ranks=2,
        data=2,
        zero=Zero.PARAMETERS,
        microbatch=2,
        recompute=Recompute.FULL,
        compile=_LAYERS,
    ),
}

_WITH_DROPOUT = (
    "gpt2", "bert", "t5", "transformer_lm",
    *(f"{name} (transformers)" for name in ("GPT-2", "OPT", "BERT", "T5")),
)  # fmt: skip


_BREAKS_IN_PROOF = {("transformer_lm", "pp")}  # an attention's unflatten, in the proof's mode only


def breaks_graphs(model: str, kind: str) -> bool:
    """Whether graphs may break: as in the proof, or because tensor ranks draw their own numbers.

    The generators of such ranks are seeded between graphs.
    """
    shares_dropout = KINDS[kind].tensor is not None and model in _WITH_DROPOUT
    return shares_dropout or (model, kind) in _BREAKS_IN_PROOF
