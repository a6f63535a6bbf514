"""Each case of the table on several ranks: one short message, and one exit code of all of them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.codegen.emit import script_text
from autopar.codegen.subject import subject_of
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.declared.file import gathered_constraints
from autopar.planning import make_plan
from tests.cells import cells
from tests.field.bad_inputs import faulty
from tests.field.bad_inputs.cases_on_ranks import ON_RANKS, OnRanks
from tests.runtime.script_ranks import Ended, run_script

RANKS = {"dp=2": 2, "pp=2": 2, "dp=2,tp=2": 4}
MOST_LINES = 5


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return a script of each plan, beside the model file."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copy(str(faulty.__file__), folder)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        for pins, ranks in RANKS.items():
            demands = {"global_batch": "8", "precision": "fp32"}
            constraints = gathered_constraints((pins,), demands, None)
            cluster = choose_cluster(ranks, "cpu")
            plan = make_plan("faulty.py", (), cluster, constraints, time_limit_seconds=None)
            found[pins] = folder / f"{pins.replace(',', '_')}.py"
            text = script_text(plan, subject_of(plan, folder), found[pins])
            found[pins].write_text(text, encoding="utf-8")
    return found


# Every third fault of one rank alone; of those that all ranks have, every sixth.
ALONE = [case for case in ON_RANKS.values() if case.at_rank is not None]
SHARED = [case for case in ON_RANKS.values() if case.at_rank is None]
STAND = ALONE[::3] + SHARED[::6]


@pytest.mark.parametrize("case", cells(ON_RANKS.values(), STAND), ids=ON_RANKS)
def test_a_mistake_is_told_once_and_ends_all_ranks(
    scripts: Mapping[str, Path], *, case: OnRanks
) -> None:
    ended = ran(case, scripts[case.plan])
    assert ended.codes == (case.code,) * RANKS[case.plan]
    assert case.message in ended.printed
    assert ended.printed.count("error: ") == (1 if case.code else 0)
    assert len(ended.printed.splitlines()) <= MOST_LINES
    for word in ("Traceback", "gloo", "c10d", "terminate"):
        assert word not in ended.printed


def ran(case: OnRanks, script: Path) -> Ended:
    """Run a script as a case has it."""
    ranks, variables = RANKS[case.plan], variables_of(case)
    return run_script(script, words_of(case), ranks=ranks, variables=variables)


def words_of(case: OnRanks) -> list[str]:
    usual = "--steps 4 --export none --log-every 4 --no-check-first-step --eval-every 4"
    return [*usual.split(), *shlex.split(case.words)]


def variables_of(case: OnRanks) -> dict[str, str]:
    """Return the environment by which the model file knows its fault."""
    return {"FAULT": case.fault, "FAULT_RANK": "" if case.at_rank is None else str(case.at_rank)}


@pytest.mark.more_cells
@pytest.mark.parametrize(
    "case",
    [
        OnRanks(
            words="--export /proc/here/", message="nothing can be written to /proc/here", code=6
        ),
        OnRanks(fault="step", at_rank=1, plan="dp=2,tp=2", message="rank 1: ZeroDivision", code=7),
        OnRanks(fault="raises", at_rank=1, plan="pp=2", message="reading a row", code=6),
        OnRanks(fault="killed", at_rank=1, words="--workers 1", message="that reads rows", code=7),
    ],
    ids=["a place", "a step", "a row", "a process that reads rows"],
)
def test_torchrun_reports_the_same_code_of_all_ranks(
    scripts: Mapping[str, Path], *, case: OnRanks
) -> None:
    ranks = RANKS[case.plan]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *torchrun, str(scripts[case.plan]), *words_of(case)],
        env=os.environ | variables_of(case) | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert case.message in done.stderr
    assert done.stderr.count("error: ") == 1
    assert done.stderr.count(f"exitcode  : {case.code}") == ranks
    message, _, _ = done.stderr.partition(" torch/distributed/elastic")  # what torchrun prints
    assert len(message.splitlines()) <= MOST_LINES
    for word in ("gloo", "c10d", "terminate"):
        assert word not in done.stderr
