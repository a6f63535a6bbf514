"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from autopar.codegen import subject
from autopar.planner.graph.graph import Graph
from autopar.planner.model.functions import DATA_READS
from autopar.planner.plan.files import cache
from autopar.planner.plan.files.cache import PLACE
from autopar.planner.plan.search import ahead
from tests.cells import ALL
from tests.planner.shared_graphs import SHARED
from tests.runtime.processes import FREEZE, freeze_for_good
from tests.warm_python import warm_python

# How long an example takes says how busy the machine is, nothing of what is tested.
_BUSY: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("half", max_examples=50, **_BUSY)
settings.register_profile(ALL, max_examples=100, **_BUSY)

# Tests that run on many processes at once. Two of them side by side get in each other's way on
# few cores, so one worker gets them all; the others go by the file.
ON_MANY_PROCESSES = (
    "tests/runtime/",
    "tests/strict/",
    "tests/codegen/forward/test_ranks.py",
    "tests/codegen/test_equality_matrix.py",
    "tests/codegen/test_plain_loops.py",
    "tests/codegen/test_run.py",
    "tests/codegen/test_two_nodes.py",
    "tests/field/",
)
# Tests that trace the same models: one worker traces each of them once.
ON_FAMILIES = ("tests/planner/axes/test_infer.py", "tests/codegen/forward/test_huggingface.py")


class OneWorkerForRanks(LoadScopeScheduling):  # type: ignore[misc]
    """Gives the tests on many processes to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(ON_MANY_PROCESSES):
            return "many processes"
        if nodeid.startswith(ON_FAMILIES):
            return "families"
        return nodeid.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    """Give each process one thread: several for so small tensors would wait for each other."""
    settings.load_profile(ALL if config.getoption("--all-cells") else "half")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
    os.environ[PLACE] = ""  # each test traces its models itself
    # else each entry would name all files of tests as sources of its model
    vars(cache).update(_OURS=(*cache._OURS, "tests"))
    torch.set_num_threads(1)
    ahead.MOST_WORKERS = 0  # tests have no idle cores: no search starts other processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--all-cells`."""
    told = "run also the cells that `make test` leaves out"
    parser.addoption("--all-cells", action="store_true", help=told)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells that others stand for; begin with what takes long.

    A long test that comes last would keep one worker busy, and the other idle.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda one: (not one.nodeid.startswith(ON_MANY_PROCESSES), one.path not in slow))
    if config.getoption("--all-cells"):
        return
    left_out = [item for item in items if item.get_closest_marker("more_cells")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keep the collector of garbage from looking through torch and transformers at every turn."""
    gc.collect()
    freeze_for_good()
    gc.set_threshold(20_000, 20, 20)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Take the schedule above whatever `--dist` says, and files in the order of their tests."""
    config.option.loadscopereorder = False
    return OneWorkerForRanks(config, log)


@pytest.fixture(autouse=True, scope="session")
def _workers_share_graphs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have each zoo model traced by one worker only: a folder of this run has the graphs."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        SHARED.store = cache.Cache(tmp_path_factory.getbasetemp().parent / "graphs")
    vars(subject).update(_traced_on_other_lengths=lru_cache(maxsize=None)(_shared_lengths))


_ZOO = Path(__file__).parents[1] / "models_zoo"
_LENGTHS = subject._traced_on_other_lengths.__wrapped__


def _shared_lengths(model: Any) -> Graph | None:
    """Trace a zoo model on rows of other lengths once in this run."""
    if model.path.parent != _ZOO or model.cache != cache.NO_CACHE:
        return _LENGTHS(model)
    key = ("other lengths", model.facts, model.precision, model.fixed_batch)
    return SHARED.graph(key, lambda: _LENGTHS(model))


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """End the process group that a test made in its own process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def forked_python() -> Iterator[None]:
    """Fork the Python programs that a test starts from a server that has imported torch."""
    with warm_python():
        yield


@pytest.fixture(scope="module")
def traced_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have commands and their processes keep a cache for all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLACE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _what_other_tests_have_read_is_forgotten() -> None:
    """Forget the data files of other tests' models: one that has changed keeps the cache empty."""
    DATA_READS.paths.clear()
    DATA_READS.variables.clear()


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> Iterator[None]:
    """Have Python collect garbage again where a test has begun a training and not ended it."""
    yield
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_leaves_is_not_looked_through() -> Iterator[None]:
    """Freeze what the tests of a file have left, such as the graphs that they share.

    Trainings in this process collect garbage several times, and would look through all of it.
    Folders of model files go from sys.path: imports would look through hundreds of them.
    """
    folders = list(sys.path)
    yield
    sys.path[:] = folders
    gc.collect()
    FREEZE()
