"""Examples train as plain loops do, under plans that suit them, and their exports are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from autopar.codegen.emit import write_script
from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.prediction import Zero
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.plans import plan_for
from tests.examples import bases
from tests.examples.plain import train_plainly
from tests.runtime.processes import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, ROWS, RATE, LENGTH = 3, 8, 1e-2, 12
FP32 = 1e-5

WAYS: Mapping[str, Mapping[str, Any]] = {
    "dp": {"degrees": (1, 2, 1), "microbatch": 2, "zero_levels": (Zero.NONE,)},
    "zero 3": {"degrees": (1, 2, 1), "microbatch": 4, "zero_levels": (Zero.PARAMETERS,)},
    "tp": {"degrees": (1, 1, 2)},
    "pp": {"degrees": (2, 1, 1), "microbatch": 4},
    "pp whole": {"degrees": (2, 1, 1), "microbatch": ROWS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example: what it starts from, and how its export is read again."""

    base: Callable[[Path], Path]
    data: Callable[[Path], Path]
    again: Callable[[Path, Path], nn.Module | Mapping[str, Tensor]]  # of the base and the export
    part: str = ""  # of the model that is exported
    arguments: tuple[str, ...] = ()
    needs: str = ""  # a library
    ways: tuple[str, ...] = field(default=("dp", "zero 3", "tp", "pp"))


def _decoder(_: Path, folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


def _adapted(base: Path, folder: Path) -> nn.Module:
    peft = import_module("peft")
    model: nn.Module = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), folder
    )
    return model


def _scorer(_: Path, folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder)
    return model


def _head(_: Path, folder: Path) -> Mapping[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _encoder(_: Path, folder: Path) -> nn.Module:
    model: nn.Module = AutoModel.from_pretrained(folder)
    return model


def _images(_: Path, folder: Path) -> Mapping[str, Tensor]:
    return load_file(folder / "model.safetensors")


SHORT = (f"length={LENGTH}",)
ANSWERS = partial(bases.texts, lengths={"prompt": 4, "answer": 5})
PREFERENCES = partial(bases.texts, lengths={"prompt": 4, "chosen": 5, "rejected": 5})
KINDS: Mapping[str, Example] = {
    "fine_tune": Example(base=bases.language_model, data=ANSWERS, again=_decoder, arguments=SHORT),
    "lora": Example(
        base=bases.language_model,
        data=ANSWERS,
        again=_adapted,
        arguments=(*SHORT, "targets=.*q_proj", "rank=2"),
        needs="peft",
    ),
    "dpo": Example(
        base=bases.language_model, data=PREFERENCES, again=_decoder, part="policy", arguments=SHORT
    ),
    "reward": Example(
        base=bases.language_model, data=PREFERENCES, again=_scorer, part="scorer", arguments=SHORT
    ),
    "classifier": Example(
        base=bases.encoder,
        data=partial(bases.texts, lengths={"text": 8}, classes=4),
        again=_head,
        part="head",
        arguments=SHORT,
        ways=("dp", "zero 3"),
    ),
    "sentence_pairs": Example(
        base=bases.encoder,
        data=partial(bases.texts, lengths={"first": 5, "second": 6}),
        again=_encoder,
        part="encoder",
        arguments=SHORT,
        ways=("tp", "pp whole"),  # the rows of a batch meet
    ),
    "vision": Example(
        base=bases.vision_model,
        data=bases.images,
        again=_images,
        arguments=(f"name={bases.VISION}", f"classes={bases.CLASSES}"),
        needs="timm",
    ),
}
CELLS = [(name, way) for name, one in KINDS.items() for way in one.ways]
STAND = {
    ("fine_tune", "tp"), ("lora", "pp"), ("reward", "zero 3"), ("vision", "pp"),
}  # fmt: skip


def losses_by_script(path: str, words: list[str]) -> list[float]:
    """Run a script as one rank, and return the losses that it logged."""
    script: Any = imported(Path(path))
    _, losses = script.main(words)
    return list(losses)


@pytest.mark.parametrize(("name", "way"), cells(CELLS, STAND))
def test_an_example_trains_as_a_plain_loop_and_its_export_is_read(
    name: str, way: str, tmp_path: Path
) -> None:
    example, out = KINDS[name], tmp_path / "out"
    pytest.importorskip(example.needs or "transformers")
    base, data = example.base(tmp_path / "base"), example.data(tmp_path / "data")
    own = (f"base={base}", f"data={data}", *example.arguments)
    file = load_model_file(str(EXAMPLES / f"{name}.py"), own)
    plan = plan_for(file, trace(file), own, global_batch=ROWS, **WAYS[way])
    script = write_script(plan, tmp_path / "script")
    words = ["--steps", str(STEPS), "--lr", str(RATE), "--log-every", "1", "--export", f"{out}/"]
    ranks = run_on_ranks(
        losses_by_script, plan.arrangement.ranks, str(script), words, timeout_seconds=240.0
    )

    plain = train_plainly(file, steps=STEPS, rows=ROWS, rate=RATE)
    assert ranks[0] == pytest.approx(plain.losses, abs=FP32, rel=0.0)
    trained = plain.model.get_submodule(example.part)
    again = example.again(base, out)
    found = again if isinstance(again, Mapping) else dict(again.named_parameters())
    assert found.keys() == dict(trained.named_parameters()).keys()
    for key, value in trained.named_parameters():
        torch.testing.assert_close(found[key], value, atol=1e-4, rtol=0.0, msg=key)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resnet50"])
def test_images_are_normalised_as_the_model_was_trained(name: str, tmp_path: Path) -> None:
    settings = pytest.importorskip("timm").get_pretrained_cfg(name)
    folder = bases.images(tmp_path / "data")
    own = (f"name={name}", f"data={folder}", "base=unread")
    file = load_model_file(str(EXAMPLES / "vision.py"), own)
    assert file.build_dataset is not None
    for row in file.build_dataset():
        mean, std = (torch.tensor(one)[:, None, None] for one in (settings.mean, settings.std))
        pixels = row["x"] * std + mean
        assert -1e-6 < pixels.min() < 0.01  # the images are noise with all values
        assert 0.99 < pixels.max() < 1 + 1e-6
