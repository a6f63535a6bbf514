"""What the options of a script mean together."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime.ranks.locations import StorePath
from autopar.runtime.ranks.options import StartingWeights, read_options


def read(*words: str, **more: int) -> Namespace:
    settings: dict[str, Any] = {
        "steps": 1, "clip": 1.0, "seed": 0, "dtype": "float32", "log_every": 1, "export": "none",
        "checkpoint": "none", "checkpoint_every": 10, "keep": 3, **more,
    }  # fmt: skip
    return read_options(words, **settings)


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


def test_a_machine_says_how_many_workers_its_ranks_may_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert read("--workers", "32", workers=0).workers == 4 * 64 // 8
    with pytest.raises(SystemExit, match="2"):
        read("--workers", "33", workers=0)
    assert "--workers: 33 is more than 32" in capsys.readouterr().err
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert read("--workers", "16", workers=0).workers == 16


def test_a_setting_that_is_empty_is_refused_as_its_option_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for setting in ({"checkpoint": ""}, {"export": " "}):
        with pytest.raises(SystemExit, match="2"):
            read(**setting)  # type: ignore[arg-type]
        assert "it is empty; is a shell variable not set?" in capsys.readouterr().err
