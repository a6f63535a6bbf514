"""What makes a script leave is told once, and all ranks leave with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from autopar.runtime.ranks import leaving
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.options import OptionParser
from tests.runtime.script_ranks import run_script

RANKS = 3
WAITING = """
    import os
    import torch.distributed as dist
    from autopar.runtime.ranks.mesh import start
    from autopar.runtime.ranks.leaving import refuse
    from autopar.runtime.ranks.options import OptionParser
    from autopar.runtime.ranks.user_code import tell_errors_once
    tell_errors_once()
    rank = int(os.environ["RANK"])
"""


def script_of(folder: Path, body: str) -> Path:
    """Return a script that knows its rank as `rank`."""
    script = folder / "script.py"
    script.write_text(dedent(WAITING) + dedent(body), encoding="utf-8")
    return script


def printed_once(printed: str) -> str:
    """Return the one message that ranks have printed."""
    assert printed.count("error: ") == 1
    assert "Traceback" not in printed
    return printed


@pytest.mark.usefixtures("forked_python")
def test_what_one_rank_finds_alone_ends_all_of_them_under_torchrun(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        """
        mesh = start(pipeline=1, data=3, tensor=1)
        if rank == 1:
            refuse("no room", fix="make some")
        dist.barrier()
        """,
    )
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
    printed, _, of_torchrun = done.stderr.partition("  fix: make some\n")
    assert printed.endswith("error: no room\n")
    assert "gloo" not in done.stderr
    assert of_torchrun.count("exitcode  : 6") == RANKS


def test_of_what_several_ranks_find_the_first_is_told(tmp_path: Path) -> None:
    found = script_of(
        tmp_path,
        """
        mesh = start(pipeline=1, data=3, tensor=1)
        refuse("rows of another shape" if rank < 2 else "no rows at all", fix="look at them")
        """,
    )
    ended = run_script(found, ranks=RANKS)
    assert ended.codes == (6,) * RANKS
    assert printed_once(ended.printed).endswith("\n  fix: look at them\n")


def test_before_ranks_join_one_tells_and_none_ends_it_by_leaving_first(tmp_path: Path) -> None:
    script = script_of(tmp_path, 'OptionParser(prog="train.py").parse_args(["--stesp"])')
    ended = run_script(script, ranks=RANKS)
    assert ended.codes == (2,) * RANKS
    assert printed_once(ended.printed) == (
        "error: unrecognized arguments: --stesp\n  fix: train.py --help lists the options\n"
    )


def test_an_error_is_told_with_its_rank_and_line_and_ends_all(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        """
        def divide():
            return 1 / 0
        mesh = start(pipeline=1, data=3, tensor=1)
        if rank == 2:
            divide()
        dist.barrier()
        """,
    )
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "1 / 0" in text)
    ended = run_script(script, ranks=RANKS)
    assert ended.codes == (7,) * RANKS
    assert printed_once(ended.printed).startswith(
        "error: rank 2: ZeroDivisionError: division by zero\n"
        f"  fix: look at {script}, line {line}; "
    )


def test_a_rank_that_is_killed_is_missed_in_one_message(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        """
        from autopar.runtime.ranks import leaving
        leaving._PATIENCE_SECONDS = 1.0
        mesh = start(pipeline=1, data=3, tensor=1)
        if rank == 2:
            os.kill(os.getpid(), 9)
        dist.barrier()
        """,
    )
    ended = run_script(script, ranks=RANKS)
    assert ended.codes == (7, 7, -9)
    assert printed_once(ended.printed).startswith(
        "error: another rank has ended without telling why\n"
    )


@pytest.mark.parametrize("is_of_torchrun", [True, False])
def test_one_process_tells_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_of_torchrun: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_of_torchrun))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")  # where nobody answers: torchrun has gone
    monkeypatch.setattr(leaving, "_PATIENCE_SECONDS", 0.2)
    with pytest.raises(SystemExit, match="6"):
        refuse("no rows", fix="look at them")
    assert capsys.readouterr().err == "error: no rows\n  fix: look at them\n"
    with pytest.raises(SystemExit, match="2"):
        OptionParser(prog="train.py").parse_args(["--stesp"])
    assert "error: unrecognized arguments: --stesp" in capsys.readouterr().err


def test_a_model_file_that_has_moved_is_told_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from autopar.runtime.ranks.user_code import tell_errors_once\n"
        "tell_errors_once()\n"
        "sys.path.insert(0, '/gone')\n"
        "import model_that_moved as model_file\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == leaving.MISMATCH
    assert "the model file (module model_that_moved) is not in /gone" in printed_once(done.stderr)
    assert "autopar emit plan.json --model PATH" in done.stderr
