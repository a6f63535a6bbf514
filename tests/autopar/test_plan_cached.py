"""What was asked before is answered from the cache: the same plan and script, without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen import subject
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.layers import Layers
from autopar.planner.plan.bounds import bounding, least
from autopar.planner.plan.files.cache import PLACE, cached_sizes
from autopar.planner.plan.files.document import read_plan
from autopar.planner.programs.layouts.choice import LayoutProgram
from tests.autopar.commands import Autopar
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
MODEL = """\
import os

import torch
from torch import nn

WIDTH = int(os.environ.get("WIDTH", "8"))


def build_model(depth: int = 1) -> nn.Module:
    layers = [nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)] * depth
    return nn.Sequential(*layers)


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(batch_size, 8)}


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return outputs.square().mean()


def build_dataset() -> list[dict[str, torch.Tensor]]:
    open("read", "a").write("x")
    raise FileNotFoundError("rows.txt")


if os.path.exists("unseen"):  # which nobody can see
    WIDTH = 24
"""
PLAN = ("plan", "model.py", "--gpus", "2", "--device", "h100-sxm", "--no-verify")


@pytest.fixture
def store(autopar: Autopar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    del autopar  # which changes into the folder
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))
    Path("model.py").write_text(MODEL)
    return tmp_path / "cache"


def kept(store: Path) -> Sequence[str]:
    """Return the kinds of the entries."""
    return sorted(path.name.split(".")[1] for path in cached_sizes(store))


def contents(folder: str) -> list[str]:
    """Return the lines of plan and script but for the seconds of the search."""
    plan = (Path(folder) / "plan.json").read_text().splitlines()
    script = (Path(folder) / "train.py").read_text().splitlines()
    timed = ("search_seconds", "# Written by autopar")
    return [line for line in (*plan, *script) if not any(word in line for word in timed)]


def test_a_plan_from_the_cache_is_the_same_and_tells_the_same(
    autopar: Autopar, store: Path
) -> None:
    cold = autopar(*PLAN, "-o", "cold")
    assert cold.code == 0, cold.err
    assert "the dataset could not be read here" in cold.err
    read = Path("read").read_text()
    warm = autopar(*PLAN, "-o", "warm")
    none = autopar(*PLAN, "-o", "none", "--no-cache")
    assert contents("cold") == contents("warm") == contents("none")
    assert cold.err == warm.err == none.err
    assert len(Path("read").read_text()) == 2 * len(read), "rows are read by --no-cache alone"
    assert Path("cold", "plan.json").read_text() == Path("warm", "plan.json").read_text()
    assert set(kept(store)) == {"least", "model", "prices", "script", "search"}


def test_the_same_question_is_neither_searched_nor_printed_again(
    autopar: Autopar, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert autopar(*PLAN, "-o", "out").code == 0
    before = {name: Path("out", name).read_bytes() for name in ("plan.json", "train.py")}

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("asked before")

    monkeypatch.setattr("autopar.planner.plan.planned.planned_curve", fail)
    monkeypatch.setattr("autopar.codegen.emit.emit_with_notes", fail)
    ran = autopar(*PLAN, "-o", "out")
    assert ran.code == 0
    assert {name: Path("out", name).read_bytes() for name in before} == before
    assert "as it was found before" in ran.out
    (search,) = (path for path in cached_sizes(store) if ".search." in path.name)
    search.write_text("damaged")
    with pytest.raises(AssertionError, match="asked before"):
        autopar(*PLAN, "-o", "out")


def test_what_an_earlier_search_found_is_not_found_again(
    autopar: Autopar, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = list[tuple[str, int, int, bool]]()  # what, tensor ranks, rows, whether compiled
    timed = list[tuple[int, int, bool]]()  # tensor ranks, rows, whether compiled

    def watched_times(pricer: OpPricer, layers: Layers, *, tensor: int, **rest: Any) -> object:
        timed.append((tensor, pricer.batch, pricer.compile.takes_layers))
        return least.least_classes(pricer, layers, tensor=tensor, **rest)

    monkeypatch.setattr(bounding, "least_classes", watched_times)
    for name in ("fastest", "front"):
        solve = getattr(LayoutProgram, name)

        def watched(program: LayoutProgram, name: str = name, solve: Any = solve) -> object:
            place = program._asked
            pricer = place.pricer
            assert isinstance(pricer, OpPricer)
            solved.append((name, place.degree, pricer.batch, pricer.compile.takes_layers))
            return solve(program)

        monkeypatch.setattr(LayoutProgram, name, watched)
    pins = ("tp=2", "dp=2", "pp=2", "microbatch=1")
    for pin in pins:
        assert autopar(*PLAN, "--pin", pin, "-o", f"{pin} warm").code == 0
    with_cache, with_times = len(solved), len(timed)
    assert len(set(solved)) == with_cache
    assert len(set(timed)) == with_times
    assert kept(store).count("prices") == len({one[1:] for one in solved})
    for pin in pins:
        assert autopar(*PLAN, "--pin", pin, "-o", f"{pin} fresh", "--no-cache").code == 0
        assert contents(f"{pin} warm") == contents(f"{pin} fresh")
    assert len(solved) > 2 * with_cache
    assert len(timed) > with_times + 1


def test_a_search_that_a_time_limit_ended_is_not_kept(autopar: Autopar, store: Path) -> None:
    assert autopar(*PLAN, "--gpus", "1,2", "--time-limit", "1e-9", "-o", "out").code != 0
    ran = autopar(*PLAN, "--time-limit", "1000", "-o", "out")
    assert ran.code == 0, ran.err
    assert kept(store).count("search") == 1
    unlimited = autopar(*PLAN, "-o", "out")
    assert "as it was found before" in unlimited.out, "no limit, and the same answer"


def test_other_pins_precisions_and_arguments_are_planned_as_without_a_cache(
    autopar: Autopar, store: Path
) -> None:
    for number, other in enumerate(
        (("--pin", "tp=2"), ("--gpus", "4", "--precision", "fp32"), ("--arg", "depth=2"))
    ):
        for name, cache in (("with", "--cache"), ("without", "--no-cache")):
            ran = autopar(*PLAN, *other, "-o", f"{name}{number}", cache)
            assert ran.code == 0, ran.err
        assert contents(f"with{number}") == contents(f"without{number}")
    assert kept(store).count("model") == 3  # pins and devices are not of the model
    assert kept(store).count("search") == kept(store).count("script") == 3


@pytest.mark.usefixtures("store")
def test_a_model_is_traced_once_without_the_cache(
    autopar: Autopar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("traced for its plan just now")

    monkeypatch.setattr("autopar.planning.trace_planned", fail)
    assert autopar(*PLAN, "-o", "out", "--no-cache").code == 0


@pytest.mark.usefixtures("store")
def test_emission_of_a_stored_plan_is_the_same_with_and_without_the_cache(
    autopar: Autopar,
) -> None:
    assert autopar(*PLAN, "-o", "out").code == 0
    for cache in ("--cache", "--no-cache"):
        assert autopar("emit", "out", "--check", cache).code == 0


@pytest.mark.usefixtures("store")
def test_an_entry_that_a_variable_has_made_stale_is_noticed_and_told(
    autopar: Autopar, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert autopar(*PLAN, "-o", "narrow").code == 0
    monkeypatch.setenv("WIDTH", "16")
    ran = autopar(*PLAN, "-o", "wide")
    assert ran.code == 0
    assert "note: the model is traced again: the environment variable WIDTH has ch" in ran.err
    autopar(*PLAN, "-o", "fresh", "--no-cache")
    assert contents("wide") == contents("fresh")
    ran = autopar("emit", "narrow", "--force")
    assert ran.code == 6
    assert "computes something else than what was planned" in ran.err


def test_what_nobody_could_see_is_noticed_when_another_script_is_written(
    autopar: Autopar, store: Path
) -> None:
    assert autopar(*PLAN, "-o", "narrow").code == 0
    Path("unseen").touch()
    ran = autopar(*PLAN, "--pin", "tp=2", "-o", "wider")
    assert ran.code == 0
    assert "note: planned again without the cache: the model file builds another" in ran.err
    autopar(*PLAN, "--pin", "tp=2", "-o", "fresh", "--no-cache")
    assert contents("wider") == contents("fresh")
    assert "model" not in kept(store)


def in_a_new_process(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def plan_first(folder: str) -> None:
    """Plan in a process of its own: an entry names all modules of its process, here no tests'."""
    with warm_python():
        planned = in_a_new_process("-m", "autopar", *PLAN, "-o", folder)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.usefixtures("store")
def test_a_plan_from_the_cache_needs_no_torch_until_its_script_is_written() -> None:
    plan_first("out")
    code = (
        "import sys; from autopar.options import request_of; "
        "from autopar.planning import make_plans; "
        "request = request_of('model.py', arguments=(), gpus='4', device='b200', nodes=None, "
        "cluster=None, pins=['tp=2'], demands={}, constraints=None, time_limit_seconds=None, "
        "profile=None); "
        "print(make_plans(request).plan.arrangement.tensor, 'torch' in sys.modules); "
        "sys.argv = ['autopar', *sys.argv[1:]]; from autopar.cli import app; "
        "app(standalone_mode=False); print('torch' in sys.modules)"
    )
    ran = in_a_new_process("-c", code, *PLAN, "-o", "out")
    first, *_, last = ran.stdout.splitlines() or [ran.stderr]
    assert (first, last) == ("2 False", "False"), ran.stdout + ran.stderr


_MAIN = "import sys; from autopar.cli import app; app(standalone_mode=False); "
HAS_TORCH = f"{_MAIN}print('torch' in sys.modules)"


def test_other_pins_after_a_first_plan_are_planned_and_printed_without_torch(
    autopar: Autopar, store: Path
) -> None:
    """Another process imports torch, and writes the script into the cache during the search."""
    plan_first("first")
    other = ("--pin", "tp=2", "--device", "a100-80gb")
    warm = in_a_new_process("-c", HAS_TORCH, *PLAN, *other, "-o", "warm")
    assert warm.stdout.endswith("False\n"), warm.stdout + warm.stderr
    assert kept(store).count("script") == 2
    assert autopar(*PLAN, *other, "-o", "fresh", "--no-cache").code == 0
    assert contents("warm") == contents("fresh")


@pytest.mark.usefixtures("store")
def test_rows_of_other_lengths_are_traced_during_a_long_search(
    autopar: Autopar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a script of stages needs no trace when other pins are asked for."""
    monkeypatch.setattr(subject, "_SHORT_SEARCH_SECONDS", 0.0)
    plan = ("plan", str(ROOT / "models_zoo" / "llama.py"), *PLAN[2:], "--arg", "size=tiny")
    kill = ForkProcess.kill
    monkeypatch.setattr(ForkProcess, "kill", lambda process: (process.join(300), kill(process)))
    assert autopar(*plan, "--pin", "dp=2", "-o", "first").code == 0
    monkeypatch.setattr("autopar.planner.trace.with_other_lengths", None)
    subject._traced_on_other_lengths.cache_clear()
    ran = autopar(*plan, "--pin", "pp=2", "-o", "second")
    assert ran.code == 0, ran.err
    assert subject._traced_on_other_lengths.cache_info().misses


def test_what_the_other_process_cannot_write_is_written_or_refused_by_this_one(
    store: Path,
) -> None:
    plan_first("first")
    Path("unseen").touch()  # so that the model file builds another model
    ran = in_a_new_process("-c", HAS_TORCH, *PLAN, "--pin", "tp=2", "-o", "wider")
    assert "note: planned again without the cache: the model file builds another" in ran.stderr
    assert ran.stdout.endswith("True\n")
    assert kept(store).count("script") == 1


def test_a_process_does_not_search_its_objects_when_it_ends() -> None:
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        "from autopar.__main__ import collect_rarely; collect_rarely()"
    )
    assert in_a_new_process("-c", code).stdout == "True\n"


def test_help_and_version_import_no_command() -> None:
    told = ("--help", "--version", "doctor --version", "doctor --help")
    code = (
        "import sys; from autopar.cli import app\n"
        f"for words in {told}:\n"
        "    app(words.split(), standalone_mode=False)\n"
        "    heavy = {'torch', 'numpy', 'networkx', 'sympy', 'pulp'} & sys.modules.keys()\n"
        "    print(f'{words} has imported {sorted(heavy)}')\n"
    )
    ran = in_a_new_process("-c", code)
    assert [one for one in told if f"{one} has imported []\n" not in ran.stdout] == [], ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.usefixtures("store")
def test_a_plan_has_the_figures_of_all_numbers_of_devices(autopar: Autopar) -> None:
    for _ in range(2):  # searched, and as it was found before
        assert autopar(*PLAN, "--gpus", "1,2", "--global-batch", "64", "-o", "out").code == 0
        plan = read_plan(Path("out"))
        assert [one.arrangement.ranks for one in plan.curve] == [1, 2]
        (own,) = (one for one in plan.curve if one.arrangement == plan.arrangement)
        assert own.step_seconds == plan.prediction.step_seconds
    assert autopar(*PLAN, "--global-batch", "64", "-o", "out").code == 0
    assert read_plan(Path("out")).curve == ()
