"""A script that is given weights starts with exactly those, and each rank reads what it holds."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import RankTrained, assembled
from autopar.codegen.proof.script_rank import run_script
from autopar.runtime.weights import stored_tensors
from autopar.runtime.weights.initial_weights import build
from tests.cells import cells
from tests.codegen.kinds import plan_of
from tests.counted_reads import Counting
from tests.planner.subjects import zoo_file
from tests.runtime.processes import run_on_ranks

STANDING = ("--steps", "1", "--lr", "0", "--data", "synthetic")  # a step that changes nothing
LAYER = "h.0."


def start_without(path: str, folder: str) -> RankTrained:
    words = ("--weights", folder, "--allow-missing", "h.1.*", "--allow-missing", "ln_f.*")
    return run_script(path, [*STANDING, *words])


def start_from(path: str, folder: str) -> tuple[RankTrained, int]:
    counting = Counting()
    with patch.object(stored_tensors, "safe_open", counting):
        trained = run_script(path, [*STANDING, "--weights", folder])
    return trained, counting.bytes


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Save other weights than those of the seed, in two files, and return them."""
    torch.manual_seed(7)
    model = zoo_file("gpt2.py", "layers=4").build_model()
    weights = {name: torch.randn_like(one) for name, one in model.named_parameters()}
    names = list(weights)
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in some}, folder / f"model-{number}.safetensors")
    return weights


KINDS = ("zero1", "zero3", "tp", "vocab", "pp", "zero_bubble_v", "ddp", "hsdp", "all")


@pytest.mark.parametrize("kind", cells(KINDS, ("zero3", "vocab", "zero_bubble_v")))
def test_every_rank_starts_with_its_part_and_reads_no_more(kind: str, tmp_path: Path) -> None:
    weights = saved_weights(tmp_path)
    plan = plan_of(kind)
    script = write_script(plan, tmp_path / "out")
    ranks = run_on_ranks(
        start_from, plan.arrangement.ranks, str(script), str(tmp_path), timeout_seconds=120.0
    )
    found = assembled(trained.parameters for trained, _ in ranks)
    assert all(torch.equal(found[name], value.double()) for name, value in weights.items())
    layer_bytes = sum(value.nbytes for name, value in weights.items() if name.startswith(LAYER))
    for trained, read_bytes in ranks:
        held = {block.name: block.value for block in trained.parameters if block.name in weights}
        share_bytes = sum(value.numel() * 4 for value in held.values())  # of fp32
        assert share_bytes <= read_bytes <= share_bytes + layer_bytes


@pytest.mark.parametrize("kind", cells(("zero3", "tp", "pp"), ("zero3",)))
def test_ranks_that_share_the_model_read_about_half_of_it(kind: str, tmp_path: Path) -> None:
    whole_bytes = sum(value.nbytes for value in saved_weights(tmp_path).values())
    script = write_script(plan_of(kind), tmp_path / "out")
    for _, read_bytes in run_on_ranks(start_from, 2, str(script), str(tmp_path)):
        assert read_bytes < 0.7 * whole_bytes


@pytest.mark.parametrize("kind", cells(("zero3", "tp", "pp"), ("pp",)))
def test_weights_that_may_be_missing_start_as_under_the_seed_in_every_plan(
    kind: str, tmp_path: Path
) -> None:
    weights = saved_weights(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        kept = {name: one for name, one in load_file(file).items() if not name.startswith("h.1.")}
        unlike = {name: torch.zeros(3) for name in kept if name.startswith("ln_f.")}
        save_file(kept | unlike, file)
    plan = plan_of(kind)
    script = write_script(plan, tmp_path / "out")
    ranks = run_on_ranks(
        start_without, plan.arrangement.ranks, str(script), str(tmp_path), timeout_seconds=120.0
    )
    fresh = dict(build(zoo_file("gpt2.py", "layers=4").build_model, seed=0).named_parameters())
    for name, value in assembled(trained.parameters for trained in ranks).items():
        if name in weights:
            source = fresh if name.startswith(("h.1.", "ln_f.")) else weights
            assert torch.equal(value, source[name].double()), name
