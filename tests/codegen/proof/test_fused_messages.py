"""What `autopar verify` says of messages that inductor fuses with products."""

from __future__ import annotations

from pathlib import Path

from autopar.codegen.emit import emit
from autopar.codegen.proof.comparison import RankTrained, SentMessage, fusing_notes
from autopar.planner.layers import Compile
from tests.codegen.plans import pinned_plan

SCRIPT = """\
from autopar.runtime.tensor import gather


class TensorParallelBlock:
    def forward(self, x):
        return gather(x, 1, self.tensor)
"""
LINE = 6


def trained(*graphs: tuple[SentMessage, ...]) -> RankTrained:
    return RankTrained(
        losses=(), norms=(), initial=(), gradients=(), parameters=(), draws=(), faults=(),
        messages=graphs,
    )  # fmt: skip


def test_messages_of_a_class_are_counted_and_those_left_are_listed_with_their_lines(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    forward = (SentMessage(what="gather", is_backward=False, is_fused=True, line=LINE),)
    backward = (SentMessage(what="sum", is_backward=True, is_fused=False, line=LINE),)
    ranks = [trained((), forward, backward), trained((), forward, backward)]
    count, left, proof = fusing_notes(ranks, path)
    assert count == "inductor fuses 1 of 2 messages of TensorParallelBlock with products"
    assert left == (
        "not fused: the sum in the backward of line 6: return gather(x, 1, self.tensor)"
    )
    assert proof.startswith("GPUs alone have the fused ops")
    assert list(fusing_notes([trained(())], path)) == []


def test_a_script_with_fused_messages_differs_from_a_compiled_one_in_one_argument(
    tmp_path: Path,
) -> None:
    texts = []
    for compile_ in (Compile.LAYERS, Compile.FUSED):
        plan = pinned_plan(
            "llama.py", ("layers=2",), compile=compile_, tensor=2, split=("seq", "vocab"),
            device="h100-sxm",
        )  # fmt: skip
        texts.append(emit(plan, destination=tmp_path / "train.py").splitlines())
    plain, fused = (
        [line for line in text if not line.startswith("# Written by autopar")] for text in texts
    )
    assert set(fused) - set(plain) == {
        "    compile_layers(model, COMPILED, fusing=mesh.tensor)",
        *(line for line in fused if "fused messages" in line),
    }
