"""What makes a script leave is told once by the ranks that share it, and by a rank alone."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from textwrap import dedent

import pytest

from autopar.runtime.ranks.option_values import NORM, STEPS
from autopar.runtime.ranks.refusal import OptionParser, refuse

RANKS = 3


def told_by_ranks(folder: Path, body: str) -> str:
    """Return what the ranks of a script print on stderr, without what torchrun does."""
    script = folder / "script.py"
    head = """
        import builtins, os, time
        import torch.distributed as dist
        from autopar.runtime.ranks.refusal import OptionParser, refuse
        rank = int(os.environ["RANK"])
    """
    script.write_text(dedent(head) + dedent(body), encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 1
    return done.stderr


def test_what_ranks_share_is_told_once_and_what_one_has_alone_too(tmp_path: Path) -> None:
    told = told_by_ranks(
        tmp_path,
        """
        dist.init_process_group("gloo")
        dist.barrier()
        try:
            refuse("rows of another shape" if rank < 2 else "no rows at all", fix="look at them")
        finally:
            time.sleep(2)  # or torchrun ends whoever has not told yet
        """,
    )
    assert told.count("error: rows of another shape\n  fix: look at them\n") == 1
    assert told.count("error: no rows at all\n  fix: look at them\n") == 1


def test_before_ranks_join_one_tells_and_none_ends_it_by_leaving_first(tmp_path: Path) -> None:
    told = told_by_ranks(
        tmp_path,
        """
        at_once, builtins.print = print, lambda *text, **how: (time.sleep(1), at_once(*text, **how))
        OptionParser(prog="train.py").parse_args(["--stesp"])
        """,
    )
    assert told.count("train.py: error: unrecognized arguments: --stesp\n") == 1
    assert told.count("usage: train.py") == 1


@pytest.mark.parametrize("is_of_torchrun", [True, False])
def test_one_process_tells_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_of_torchrun: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_of_torchrun))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")  # where nobody answers: torchrun has gone
    monkeypatch.setattr("autopar.runtime.ranks.refusal._PATIENCE", timedelta(seconds=1))
    with pytest.raises(SystemExit, match="6"):
        refuse("no rows", fix="look at them")
    assert capsys.readouterr().err == "error: no rows\n  fix: look at them\n"
    with pytest.raises(SystemExit, match="2"):
        OptionParser(prog="train.py").parse_args(["--stesp"])
    assert "train.py: error: unrecognized arguments: --stesp" in capsys.readouterr().err


def test_a_setting_is_read_as_its_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser(prog="train.py")
    parser.add_argument("--steps", type=STEPS, default=0)
    parser.add_argument("--clip", type=NORM, default=None)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([])
    assert "--steps: 0 is not a whole number of 1 or more" in capsys.readouterr().err
    read = parser.parse_args(["--steps", "3"])
    assert (read.steps, read.clip) == (3, None)
    assert parser.parse_args(["--steps", "3", "--clip", "0"]).clip == 0
