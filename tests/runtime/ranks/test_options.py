"""What the options of a script mean together."""

from __future__ import annotations

from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autopar.runtime.ranks import options
from autopar.runtime.ranks.locations import StorePath
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.options import StartingWeights, check_same_options, read_options


def read(*words: str, **more: Any) -> Namespace:
    settings: dict[str, Any] = {
        "STEPS": 1, "CLIP_NORM": 1.0, "SEED": 0, "DTYPE": "float32", "LOG_EVERY": 1,
        "EXPORT": "none", "CHECKPOINT": "none", "CHECKPOINT_EVERY": 10, "KEEP": 3,
        "CHECK_FIRST_STEP": False,
    }  # fmt: skip
    settings |= {name.upper(): value for name, value in more.items()}
    return read_options(words, settings)


def test_weights_come_with_what_they_may_lack(capsys: pytest.CaptureFixture[str]) -> None:
    assert read().weights is None
    assert read("--weights", "a").weights == StartingWeights(files=Path("a"))
    found = read("--weights", "a", "--allow-missing", "head.*", "--allow-missing", "b").weights
    assert found == StartingWeights(files=Path("a"), may_lack=("head.*", "b"))
    with pytest.raises(SystemExit, match="2"):
        read("--allow-missing", "head.*")
    assert "there are no --weights" in capsys.readouterr().err


def test_a_store_has_weights_and_checkpoints_but_no_lines_that_are_added(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read("--weights", "memory://a/").weights == StartingWeights(
        files=StorePath("memory://a")
    )
    with pytest.raises(SystemExit, match="2"):
        read("--metrics", "memory://a/metrics.jsonl")
    assert "name one on a disk" in capsys.readouterr().err


def test_what_stops_early_has_to_be_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    assert (read().eval_every, read().early_stop) == (0, None)
    assert read("--early-stop", "2", eval_every=5).early_stop == 2
    with pytest.raises(SystemExit, match="2"):
        read("--early-stop", "2", "--eval-every", "0", eval_every=5)
    assert "--eval-every 0 has none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        (("--epochs", "2", "--steps", "5"), "not allowed with argument"),
        (("--epochs", "0"), "0 is not a number of 1e-09 or more"),
        (("--epochs", "1e999999999"), "is more than 1e+06"),
        (("--epochs", "nan"), "nan is not a number"),
        (("--epochs", "1/0"), "1/0 is not a number"),
        (("--epochs", "2", "--data", "synthetic"), "--data synthetic reads none"),
        (("--last-rows", "keep"), "invalid choice: 'keep'"),
    ],
)
def test_epochs_stand_in_the_place_of_steps(
    words: tuple[str, ...], telling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read("--epochs", "0.1", workers=0).epochs == Fraction(1, 10)
    assert (read("--steps", "7", workers=0).steps, read().epochs) == (7, None)
    with pytest.raises(SystemExit, match="2"):
        read(*words, workers=0)
    assert telling in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "others", "is_compared"),
    [
        ("--epochs 2", "", True),
        ("--last-rows drop", "", True),
        ("--data synthetic", "", True),
        ("--lr 0.1", "", True),
        ("--dtype float64", "", True),
        ("--export w", "", True),
        ("--export w", "--export v", False),
        ("--weights w", "", True),
        ("--weights w", "--weights v", False),
        ("--weights w --allow-missing a", "--weights w --allow-missing b", True),
        ("--workers 1", "", False),
        ("--metrics lines.jsonl", "", False),
    ],
)
def test_ranks_may_differ_only_in_options_that_do_not_change_what_they_do(
    words: str, others: str, is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[int]] = []

    def differing(own: list[int], *_: object) -> dict[int, int]:
        given.append(own)
        return {}

    monkeypatch.setattr(options, "differing", differing)
    for one in (words, others):
        check_same_options(read(*one.split(), workers=0), cast("Mesh", SimpleNamespace(world=None)))
    assert (given[0] != given[1]) is is_compared


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        ((), "none is kept: add --checkpoint FOLDER"),
        (("--checkpoint", "kept", "--eval-every", "0"), "--eval-every 0 has none"),
        (("--checkpoint", "kept", "--export", "none"), "--export none exports nothing"),
    ],
)
def test_the_best_weights_are_those_of_a_checkpoint(
    words: tuple[str, ...], telling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"eval_every": 5, "export": "w.safetensors"}
    assert read("--export-best", "--checkpoint", "kept", **usual).export_best
    with pytest.raises(SystemExit, match="2"):
        read("--export-best", *words, **usual)
    assert telling in capsys.readouterr().err


def test_what_the_usual_optimizer_is_made_of_are_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = {"betas": (0.9, 0.95), "weight_decay": 0.1, "warmup_steps": 2000}
    found = read(**usual)
    assert (found.betas, found.weight_decay, found.warmup_steps) == ((0.9, 0.95), 0.1, 2000)
    words = ("--betas", "0.8", "0", "--weight-decay", "0.3", "--warmup-steps", "0")
    found = read(*words, **usual)
    assert (found.betas, found.weight_decay, found.warmup_steps) == ((0.8, 0.0), 0.3, 0)
    with pytest.raises(SystemExit, match="2"):
        read("--betas", "0.9", "1", **usual)
    assert "1 is not a number below 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        read("--betas", "0.9", "0.95")  # the model file makes the optimizer
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_machine_says_how_many_workers_its_ranks_may_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autopar.runtime.ranks.options.usable_cores", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert read("--workers", "32", workers=0).workers == 4 * 64 // 8
    with pytest.raises(SystemExit, match="2"):
        read("--workers", "33", workers=0)
    assert "--workers: 33 is more than 32" in capsys.readouterr().err
    monkeypatch.setattr("autopar.runtime.ranks.options.usable_cores", lambda: 1)
    assert read("--workers", "16", workers=0).workers == 16


@pytest.mark.parametrize(
    ("setting", "telling"),
    [
        ({"checkpoint": ""}, "it is empty; is a shell variable not set?"),
        ({"export": " "}, "it is empty; is a shell variable not set?"),
        ({"steps": 0}, "--steps: 0 is not a whole number of 1 or more"),
    ],
)
def test_a_setting_of_the_script_is_checked_as_its_option_is(
    setting: dict[str, Any], telling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(**setting)
    assert telling in capsys.readouterr().err


@pytest.mark.parametrize(("has_gpu", "workers"), [(True, 2), (False, 0)])
def test_a_gpu_has_workers_that_read_ahead(
    has_gpu: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert read(workers="auto").workers == workers
    assert read("--workers", "3", workers="auto").workers == 3
    assert read(workers=1).workers == 1
