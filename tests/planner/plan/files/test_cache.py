"""A traced model comes back from the cache as it was, and not where anything of it has changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from autopar.planner.findings.traits import OptimizerTraits, Reach, ScheduleEnd
from autopar.planner.plan.files import cache
from autopar.planner.plan.files.cache import (
    PLACE,
    Question,
    cache_folder,
    cached_sizes,
    forget,
    keep,
    recalled,
)
from autopar.planner.plan.traced import TracedModel
from autopar.planner.precision import Precision
from tests.planner.plan.plans import model
from tests.planner.subjects import zoo_graph

pytestmark = pytest.mark.usefixtures("store")

TRAITS = OptimizerTraits(
    name="Muon",
    reach=Reach.PARAMETER,
    groups_by_place=True,
    moments=(1.0, 2.0),
    own_tensors=("kept",),
    ends=ScheduleEnd(3, "ended", "model.py:4"),
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def question(tmp_path: Path) -> Iterator[Question]:
    """A model file that imports another one, both loaded."""
    (tmp_path / "net.py").write_text("import parts_of_net\n")
    (tmp_path / "parts_of_net.py").write_text("SIZE = 1\n")
    sys.path.insert(0, str(tmp_path))
    import parts_of_net  # type: ignore[import-not-found]

    yield Question(
        path=tmp_path / "net.py",
        factory="build_model",
        arguments=("size=1",),
        precision=Precision.BF16,
        rows=None,
    )
    sys.path.remove(str(tmp_path))
    del sys.modules[parts_of_net.__name__]


def traced(name: str = "mnist.py", **changes: object) -> TracedModel:
    graph = zoo_graph(name)
    usual = TracedModel(model=model(graph, name), graph=graph, optimizer=TRAITS, notes=("told",))
    return replace(usual, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mnist.py", "gpt2.py", "t5.py"])
def test_a_traced_model_comes_back_exactly(name: str, store: Path, question: Question) -> None:
    assert recalled(question) is None
    keep(question, traced(name))
    assert repr(recalled(question)) == repr(traced(name, is_recalled=True))
    (entry,) = store.iterdir()
    assert entry.stat().st_mode & 0o077 == 0, "nobody else reads what a model computes"


def test_any_change_of_what_was_asked_or_read_is_a_miss(question: Question) -> None:
    keep(question, traced())
    for changed in (
        replace(question, arguments=("size=2",)),
        replace(question, factory="build_other"),
        replace(question, precision=Precision.FP32),
        replace(question, path=question.path.with_name("other.py")),
    ):
        assert recalled(changed) is None
    for name in ("net.py", "parts_of_net.py"):
        file = question.path.with_name(name)
        text = file.read_text()
        file.write_text(f"{text}# changed\n")
        assert recalled(question) is None
        file.write_text(text)
        assert recalled(question) is not None


def test_another_version_of_a_library_is_a_miss(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(question, traced())
    versions = cache._version
    monkeypatch.setattr(cache, "_version", lambda name: versions(name) + "1" * (name == "numpy"))
    assert recalled(question) is None


def test_rows_matter_for_a_model_that_takes_one_number_of_them_alone(
    question: Question,
) -> None:
    keep(question, traced())
    assert recalled(replace(question, rows=16)) is not None
    fixed = traced()
    fixed = replace(fixed, graph=replace(fixed.graph, fixed_batch=6))
    keep(question, fixed)
    assert recalled(question) is not None
    assert recalled(replace(question, rows=6)) is not None
    sixteen = replace(question, rows=16)
    assert recalled(sixteen) is None
    keep(sixteen, fixed)  # the number stands in its code, so it was traced for 6 again
    assert recalled(sixteen) is not None


@pytest.mark.parametrize(
    "broken", [b"", b"\xff", b"0" * 64, b'{"files": {}}', b"[" * 100_000, b"cut", b"bits"]
)
def test_a_broken_entry_is_passed_over_and_written_anew(
    broken: bytes, store: Path, question: Question
) -> None:
    keep(question, traced())
    (entry,) = store.iterdir()
    sound = entry.read_bytes()
    changes = {b"cut": sound[:-9], b"bits": sound.replace(b"aten.relu", b"aten.silu")}
    entry.write_bytes(changes.get(broken, broken))
    assert recalled(question) is None
    keep(question, traced())
    assert recalled(question) is not None


def test_a_cache_is_bounded_and_loses_what_was_used_longest_ago(
    store: Path, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [replace(question, arguments=(f"size={size}",)) for size in range(4)]
    for one in questions[:3]:
        keep(one, traced())
    (size, *_) = cached_sizes(store).values()
    for age, path in enumerate(question.places(store)[0] for question in questions[:3]):
        os.utime(path, (100 - age, 100 - age))
    assert recalled(questions[2]) is not None  # so it is used last, though it was the oldest
    monkeypatch.setattr(cache, "MOST_BYTES", int(size * 3.5))
    keep(questions[3], traced())
    assert [recalled(one) is not None for one in questions] == [True, False, True, True]


def test_a_cache_can_be_elsewhere_turned_off_or_out_of_reach(
    tmp_path: Path, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "autopar"
    monkeypatch.setenv(PLACE, "")
    assert cache_folder() is None
    keep(question, traced())
    assert recalled(question) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(PLACE, str(tmp_path / "file"))
    keep(question, traced())
    assert recalled(question) is None


def test_what_turned_out_to_be_stale_is_forgotten(question: Question) -> None:
    keep(question, traced())
    forget(question)
    assert recalled(question) is None


def _keep_often(question: Question) -> None:
    for _ in range(20):
        keep(question, traced())
        assert recalled(question) is not None


def test_processes_that_write_at_once_do_not_disturb_each_other(
    store: Path, question: Question
) -> None:
    traced()  # once, before there are two
    context = get_context("fork")
    writers = [context.Process(target=_keep_often, args=(question,)) for _ in range(2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(60)
    assert [one.exitcode for one in writers] == [0, 0]
    assert len(list(store.iterdir())) == 1
