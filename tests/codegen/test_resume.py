"""Trainings that go on from checkpoints, under the plan that wrote them or under another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from autopar.codegen.emit import write_script
from autopar.codegen.proof.exactness import ExactMode
from autopar.codegen.proof.script_rank import imported
from autopar.planner.costs.prediction import Offload, Zero
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.plans import pinned_plan, plan_for
from tests.field import trial
from tests.field.cells import AWKWARD, FAMILIES, MODELS, Kind, Subject
from tests.field.cells import KINDS as FIELD_KINDS
from tests.planner.subjects import ZOO
from tests.runtime.processes import run_on_ranks
from tests.strict.ranks import run_on_strict_ranks

STILL = ("layers=4", "dropout=0.0")
LEGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dp4": {"data": 4, "microbatch": 1, "zero_levels": (Zero.OPTIMIZER,)},
        "tp2 × pp2": {"tensor": 2, "pipeline": 2, "microbatch": 2, "split": ("ffn", "heads")},
        "one": {"microbatch": 4},
        "zero3": {"data": 4, "microbatch": 1, "zero_levels": (Zero.PARAMETERS,)},
        "pp2 × dp2": {"pipeline": 2, "data": 2, "microbatch": 2, "zero_levels": (Zero.NONE,)},
    }
)
STEPS_OF_LEG = 2


def run_script(path: str, arguments: Sequence[str]) -> list[float]:
    """Run a script here, and return the losses that it logs."""
    script: Any = imported(Path(path))
    _, losses = script.main(["--log-every", "1", "--lr", "0.01", *arguments])
    found: list[float] = losses
    return found


def run_as_given(path: str, arguments: Sequence[str]) -> list[float]:
    """Run a script at its own learning rate."""
    script: Any = imported(Path(path))
    found: list[float] = script.main(arguments)[1]
    return found


def trained(plan: Plan, folder: Path, steps: int, *arguments: str) -> list[float]:
    """Train to a step by the script of a plan, and return the losses of this run."""
    script = write_script(plan, folder, force=True)
    own = ["--steps", str(steps), "--export", str(exported(folder)), *arguments]
    return run_on_strict_ranks(run_script, plan.arrangement.ranks, str(script), own)[0]


def exported(folder: Path) -> Path:
    return folder / "model.safetensors"


def checkpoints(folder: Path) -> tuple[str, str]:
    return "--checkpoint", str(folder / "kept")


def kept_in(folder: Path, step: int) -> Path:
    return folder / "kept" / f"step-{step}"


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((value - expected[name]).abs().max().item() for name, value in found.items())


def test_each_plan_goes_on_where_another_one_was(tmp_path: Path) -> None:
    plans = [pinned_plan("gpt2.py", STILL, **pins) for pins in LEGS.values()]
    exact = ("--dtype", "float64")
    losses: list[float] = []
    for number, plan in enumerate(plans, start=1):
        steps = number * STEPS_OF_LEG
        losses += trained(plan, tmp_path, steps, *exact, *checkpoints(tmp_path))
        assert len(losses) == steps
        sizes = [file.stat().st_size for file in kept_in(tmp_path, steps).glob("*.safetensors")]
        assert len(sizes) == plan.arrangement.ranks
        if plan.arrangement.pipeline == 1:  # stages are as large as they are
            assert len(sizes) * max(sizes) < 1.15 * sum(sizes), "each rank writes its share"
    found = load_file(exported(tmp_path))
    expected = trained(plans[2], tmp_path, len(plans) * STEPS_OF_LEG, *exact)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-9
    assert apart(found, load_file(exported(tmp_path))) < 1e-9
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"step-6", "step-8", "step-10"}


HOST_LEGS: tuple[Mapping[str, Any], ...] = (
    {"data": 2, "zero_levels": (Zero.OPTIMIZER,), "offloads": (Offload.OPTIMIZER,)},
    {"tensor": 2},
    {"zero_levels": (Zero.PARAMETERS,), "offloads": (Offload.OPTIMIZER,)},
)


def test_a_training_goes_on_with_its_optimizer_elsewhere(tmp_path: Path) -> None:
    plans = [pinned_plan("gpt2.py", STILL, **pins) for pins in HOST_LEGS]
    exact = ("--dtype", "float64")
    losses: list[float] = []
    for number, plan in enumerate(plans, start=1):
        losses += trained(plan, tmp_path, 2 * number, *exact, *checkpoints(tmp_path))
    found = load_file(exported(tmp_path))
    expected = trained(plans[1], tmp_path, 2 * len(plans), *exact)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-9
    assert apart(found, load_file(exported(tmp_path))) < 1e-9


LEGS_OF_MODELS: Mapping[str, Kind] = MappingProxyType(
    {
        "dp4": Kind(ranks=4, data=4, microbatch=1, zero=Zero.OPTIMIZER),
        "tp2 × pp2": Kind(ranks=4, tensor=2, pipeline=2, microbatch=2),
        "one": Kind(ranks=1, data=1, microbatch=4),
        "zero3": Kind(ranks=4, data=4, microbatch=1, zero=Zero.PARAMETERS),
        "pp2 × dp2": Kind(ranks=4, pipeline=2, data=2, microbatch=2, zero=Zero.NONE),
        "dp4 again": Kind(ranks=4, data=4, microbatch=1, zero=Zero.OPTIMIZER),
    }
)


def _of_zoo(name: str, *arguments: str) -> Subject:
    return Subject(path=ZOO / f"{name}.py", arguments=arguments)


def _of_hugging_face(family: str) -> Subject:
    return Subject(path=MODELS / "hugging_face_rows.py", arguments=(f"family={family}",))


MODELS_OF_CHAIN: Mapping[str, Subject] = MappingProxyType(
    {
        "bert": _of_zoo("bert"),  # a dropout of its own
        "t5": _of_zoo("t5"),
        "vit": _of_zoo("vit"),
        "resnet": _of_zoo("resnet"),  # batch norms, which take no microbatches
        "llama": _of_zoo("llama"),
        "tied three ways": AWKWARD["tied three ways"],
        "frozen teacher": AWKWARD["frozen teacher"],
        "steady buffers": AWKWARD["steady buffers"],
        "drawn rows": AWKWARD["drawn rows"],
        "own choices": AWKWARD["own choices"],
        **{
            family: _of_hugging_face(family)
            for family in ("GPT-2", "Mixtral", "BERT", "Whisper", "ResNet", "Mamba", "T5")
        },
    }
)
WHOLE = MappingProxyType(
    {name: {**AWKWARD, **FAMILIES}[name] for name in ("pairs", "views", "CLIP")}
)
LEGS_OF_WHOLE: Mapping[str, Kind] = MappingProxyType(  # rows that meet stay in one batch
    {
        "tp4": Kind(ranks=4, tensor=4),
        "tp2 × pp2": Kind(ranks=4, tensor=2, pipeline=2),
        "one": Kind(ranks=1, data=1),
        "pp2": Kind(ranks=2, pipeline=2),
    }
)


def run_still(path: str, arguments: Sequence[str]) -> list[float]:
    """Run a script without its dropout."""
    script: Any = imported(Path(path))
    step = script.train_step

    def still(*args: Any, **kwargs: Any) -> Tensor:
        with ExactMode(torch.float64):
            found: Tensor = step(*args, **kwargs)
        return found

    script.train_step = still
    _, losses = script.main(arguments)
    kept: list[float] = losses
    return kept


@pytest.mark.parametrize("model", cells((*MODELS_OF_CHAIN, *WHOLE), ()))
def test_a_model_goes_on_under_each_plan_and_back(model: str, tmp_path: Path) -> None:
    """Each leg begins with what the one before had kept, and trains to the end."""
    subject = {**MODELS_OF_CHAIN, **WHOLE}[model]
    legs = LEGS_OF_WHOLE if model in WHOLE else LEGS_OF_MODELS
    steps = len(legs) * STEPS_OF_LEG
    usual: tuple[str, ...] = ("--dtype", "float64", "--log-every", "1", "--steps", str(steps))
    usual += ("--checkpoint-every", str(STEPS_OF_LEG), "--keep", str(steps))

    def run(kind: Kind, name: str, *arguments: str) -> tuple[list[float], dict[str, Tensor]]:
        plan, file = trial.plan_of(subject, kind), tmp_path / f"{name}.safetensors"
        script = str(write_script(plan, tmp_path, force=True))
        own = [*usual, "--export", str(file), "--checkpoint", str(tmp_path / name), *arguments]
        losses = run_on_ranks(run_still, plan.arrangement.ranks, script, own)[0]
        return losses, load_file(file)

    expected, weights = run(legs["one"], "alone")
    before: list[str] = []
    for number, (name, kind) in enumerate(legs.items()):
        losses, found = run(kind, name, *before)
        rest = expected[number * STEPS_OF_LEG :]
        assert max(abs(a - b) for a, b in zip(losses, rest, strict=True)) < 1e-9, name
        assert apart(found, weights) < 1e-9, name
        before = ["--resume", str(tmp_path / name / f"step-{(number + 1) * STEPS_OF_LEG}")]
    assert len(set(expected)) == steps


SAME = tuple(zip(MODELS_OF_CHAIN, cycle(("zero-3 2", "pp 2", "tp 2")), strict=False))


@pytest.mark.parametrize(("model", "kind"), cells(SAME, ()))
def test_a_model_goes_on_to_the_bit_under_its_own_plan(
    model: str, kind: str, tmp_path: Path
) -> None:
    plan = trial.plan_of(MODELS_OF_CHAIN[model], FIELD_KINDS[kind])
    every = ("--checkpoint-every", "2", "--checkpoint", str(tmp_path / "first"))
    expected = trained(plan, tmp_path, 5, *every)
    weights = load_file(exported(tmp_path))
    again = ("--resume", str(tmp_path / "first" / "step-2"), *checkpoints(tmp_path))
    assert trained(plan, tmp_path, 5, *again) == expected[2:]
    assert apart(load_file(exported(tmp_path)), weights) == 0


KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "zero1": {"data": 2, "microbatch": 2, "zero_levels": (Zero.OPTIMIZER,)},
        "tp2 zero3": {
            "data": 2, "tensor": 2, "microbatch": 2, "split": ("ffn", "heads"),
            "zero_levels": (Zero.PARAMETERS,),
        },
        "pp2": {"pipeline": 2, "microbatch": 2},
    }
)  # fmt: skip


def test_usual_rates_and_decays_go_on_under_another_plan(tmp_path: Path) -> None:
    first, last = (
        pinned_plan("llama.py", ("layers=4",), **pins)  # it has no optimizer of its own
        for pins in (KINDS["zero1"], KINDS["pp2"])
    )
    exact = ("--dtype", "float64")
    every = ("--checkpoint-every", "5", *checkpoints(tmp_path))
    expected = trained(first, tmp_path, 10, *exact, *every)
    weights = load_file(exported(tmp_path))
    again = (*exact, "--resume", str(kept_in(tmp_path, 5)), "--checkpoint")
    losses = trained(last, tmp_path, 10, *again, str(tmp_path / "other"))
    assert max(abs(a - b) for a, b in zip(losses, expected[5:], strict=True)) < 1e-9
    assert apart(load_file(exported(tmp_path)), weights) < 1e-9
    fewer = trained(last, tmp_path, 7, *again, str(tmp_path / "third"))
    assert fewer[0] == losses[0]  # before a step of another rate
    assert fewer[1] != losses[1]


BITWISE = [("zero1", "bfloat16"), ("pp2", "float32"), ("tp2 zero3", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), cells(BITWISE, BITWISE[:1]))
def test_the_same_plan_goes_on_to_the_bit_with_dropout(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    plan = pinned_plan("gpt2.py", ("layers=4", "dropout=0.1"), **KINDS[kind])
    expected = trained(plan, tmp_path, 5, "--dtype", dtype)
    weights = load_file(exported(tmp_path))
    losses = trained(plan, tmp_path, 2, "--dtype", dtype, *checkpoints(tmp_path))
    losses += trained(plan, tmp_path, 5, "--dtype", dtype, *checkpoints(tmp_path))
    assert losses == expected
    assert apart(load_file(exported(tmp_path)), weights) == 0
    assert torch.isfinite(torch.tensor(losses)).all()


SCHEDULED = """
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def example_batch(batch_size):
    return {"input": torch.randn(batch_size, 4), "wanted": torch.rand(batch_size, 1)}


def loss(outputs, batch):
    return nn.functional.mse_loss(outputs, batch["wanted"])


def build_optimizer(parameters):
    return SGD(parameters, lr=0.1, momentum=0.9)


def build_scheduler(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 6)]
    return SequentialLR(optimizer, parts, [3])


def build_dataset():
    rows = torch.Generator().manual_seed(1)
    return [
        {"input": torch.randn(4, generator=rows), "wanted": torch.rand(1, generator=rows)}
        for _ in range(21)
    ]
"""


@pytest.mark.parametrize("precision", cells((Precision.FP16, Precision.FP32), [Precision.FP16]))
def test_schedules_loss_scales_and_epochs_go_on(precision: Precision, tmp_path: Path) -> None:
    (tmp_path / "scheduled.py").write_text(SCHEDULED, encoding="utf-8")
    file = load_model_file(str(tmp_path / "scheduled.py"))
    plan = plan_for(file, trace(file), (), degrees=(1, 1, 1), precision=precision)
    script = write_script(plan, tmp_path)
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("32768.0", "3e38").replace("2000  #", "2  #"), encoding="utf-8")

    def run(steps: int, *arguments: str) -> list[float]:
        own = ["--steps", str(steps), "--log-every", "1", *arguments]
        return run_on_ranks(run_as_given, 1, str(script), own)[0]

    expected = run(9)
    losses = run(4, *checkpoints(tmp_path)) + run(9, *checkpoints(tmp_path))
    assert losses == expected
    assert len(set(losses)) > 5
