"""Entries come back from the cache as they were, and not where their sources have changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from autopar.planner.findings import OptimizerTraits, Reach, ScheduleEnd
from autopar.planner.model.functions import DATA_READS
from autopar.planner.model.model_file import import_file
from autopar.planner.plan.files import cache
from autopar.planner.plan.files.cache import (
    NO_CACHE,
    PLACE,
    Cache,
    CachedModel,
    CachedScript,
    Question,
    cache_folder,
    cached_sizes,
)
from autopar.planner.plan.traced import TracedModel
from autopar.planner.precision import Precision
from tests.planner.plan.plans import model
from tests.planner.subjects import zoo_graph

TRAITS = OptimizerTraits(
    name="Muon",
    reach=Reach.PARAMETER,
    groups_by_position=True,
    moments=(1.0, 2.0),
    own_tensors=("kept",),
    ends=ScheduleEnd(3, "ended", "model.py:4"),
)


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


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
        compiles=False,
    )
    sys.path.remove(str(tmp_path))
    del sys.modules[parts_of_net.__name__]


def traced(name: str = "mnist.py", **changes: object) -> TracedModel:
    graph = zoo_graph(name)
    usual = TracedModel(model=model(graph, name), graph=graph, optimizer=TRAITS, notes=("told",))
    return replace(usual, **changes)  # type: ignore[arg-type]


def sizes(store: Cache) -> Mapping[Path, int]:
    assert store.folder is not None
    return cached_sizes(store.folder)


@pytest.mark.parametrize("name", ["mnist.py", "gpt2.py", "t5.py"])
def test_a_traced_model_comes_back_exactly(name: str, store: Cache, question: Question) -> None:
    assert question.find(store) is None
    question.keep(traced(name), store)
    assert repr(question.find(store)) == repr(traced(name))
    (entry,) = sizes(store)
    assert entry.stat().st_mode & 0o077 == 0, "nobody else reads what a model computes"


def test_any_change_of_what_was_asked_or_read_is_a_miss(store: Cache, question: Question) -> None:
    question.keep(traced(), store)
    for changed in (
        replace(question, arguments=("size=2",)),
        replace(question, factory="build_other"),
        replace(question, precision=Precision.FP32),
        replace(question, path=question.path.with_name("other.py")),
    ):
        assert changed.find(store) is None
    for name in ("net.py", "parts_of_net.py"):
        file = question.path.with_name(name)
        text = file.read_text()
        file.write_text(f"{text}# changed\n")
        assert question.find(store) is None
        file.write_text(text)
        assert question.find(store) is not None


def test_another_version_of_a_library_is_a_miss(
    store: Cache, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    question.keep(traced(), store)
    versions = cache._version
    monkeypatch.setattr(cache, "_version", lambda name: versions(name) + "1" * (name == "numpy"))
    assert question.find(store) is None


def test_rows_matter_for_a_model_that_takes_one_number_of_them_alone(
    store: Cache,
    question: Question,
) -> None:
    question.keep(traced(), store)
    assert replace(question, rows=16).find(store) is not None
    fixed = traced()
    fixed = replace(fixed, graph=replace(fixed.graph, fixed_batch=6))
    question.keep(fixed, store)
    assert question.find(store) is not None
    assert replace(question, rows=6).find(store) is not None
    sixteen = replace(question, rows=16)
    assert sixteen.find(store) is None
    sixteen.keep(fixed, store)  # the number stands in its code, so it was traced for 6 again
    assert sixteen.find(store) is not None


def test_a_model_whose_layers_were_not_tried_is_no_answer_where_they_may_be_compiled(
    store: Cache, question: Question
) -> None:
    tried = replace(question, compiles=True)
    question.keep(traced(), store)
    assert tried.find(store) is None
    question.forget(store)
    tried.keep(traced(), store)
    assert question.find(store) is not None
    assert tried.find(store) is not None


@pytest.mark.parametrize(
    "broken", [b"", b"\xff", b"0" * 64, b'{"files": {}}', b"[" * 100_000, b"cut", b"bits"]
)
def test_a_broken_entry_is_passed_over_and_written_anew(
    broken: bytes, store: Cache, question: Question
) -> None:
    question.keep(traced(), store)
    (entry,) = sizes(store)
    sound = entry.read_bytes()
    changes = {b"cut": sound[:-9], b"bits": sound.replace(b"aten.relu", b"aten.silu")}
    entry.write_bytes(changes.get(broken, broken))
    assert question.find(store) is None
    question.keep(traced(), store)
    assert question.find(store) is not None


def test_a_cache_is_bounded_and_loses_what_was_used_longest_ago(
    store: Cache, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [replace(question, arguments=(f"size={size}",)) for size in range(4)]
    for one in questions[:3]:
        one.keep(traced(), store)
    (size, *_) = sizes(store).values()
    for age, path in enumerate(store.place(CachedModel, one) for one in questions[:3]):
        os.utime(path, (100 - age, 100 - age))
    assert questions[2].find(store) is not None  # so it is used last, though it was the oldest
    monkeypatch.setattr(cache, "MOST_BYTES", int(size * 3.5))
    questions[3].keep(traced(), store)
    assert [one.find(store) is not None for one in questions] == [True, False, True, True]


def test_a_cache_can_be_elsewhere_turned_off_or_out_of_reach(
    tmp_path: Path, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "autopar"
    monkeypatch.setenv(PLACE, "")
    assert cache_folder() is None
    (tmp_path / "file").write_text("")
    for unusable in (NO_CACHE, Cache(tmp_path / "file")):
        question.keep(traced(), unusable)
        assert question.find(unusable) is None
        question.forget(unusable)


def test_what_turned_out_to_be_stale_is_forgotten(store: Cache, question: Question) -> None:
    question.keep(traced(), store)
    question.forget(store)
    assert question.find(store) is None


def _keep_often(store: Cache, question: Question) -> None:
    for _ in range(3):
        question.keep(traced(), store)
        assert question.find(store) is not None


def test_processes_that_write_at_once_do_not_disturb_each_other(
    store: Cache, question: Question
) -> None:
    traced()  # once, before there are two
    context = get_context("fork")
    writers = [context.Process(target=_keep_often, args=(store, question)) for _ in range(2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(60)
    assert [one.exitcode for one in writers] == [0, 0]
    assert len(sizes(store)) == 1


READER = """\
import os
from pathlib import Path

WIDTH = int(os.environ.get("WIDTH_OF_NET", "8"))
os.environ.setdefault("SET_BY_NET", "1")
ROWS = [line for path in sorted(Path("rows").glob("*.txt")) for line in path.open()]
try:
    EXTRA = open("extra.json").read()
except FileNotFoundError:
    EXTRA = ""
Path("written.log").write_text("seen")
COPY = dict(os.environ)
"""


@pytest.fixture
def reader(
    tmp_path: Path, question: Question, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Question]:
    """A model file that reads a variable, a folder of files, and a file that is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOT_READ_BY_NET", "1")
    for name in ("WIDTH_OF_NET", "SET_BY_NET"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "one.txt").write_text("1")
    question.path.write_text(READER)
    with DATA_READS.watched():
        import_file(question.path)
    monkeypatch.delenv("SET_BY_NET")
    yield question
    del sys.modules["net"]


def edited(path: str, text: str) -> Callable[[pytest.MonkeyPatch], object]:
    return lambda _: Path(path).write_text(text)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (edited("rows/one.txt", "2"), "rows/one.txt"),
        (edited("rows/two.txt", "2"), "rows"),
        (edited("extra.json", "{}"), "extra.json"),
        (lambda patch: patch.setenv("WIDTH_OF_NET", "16"), "the environment variable WIDTH_OF_NET"),
        (lambda patch: patch.setenv("SET_BY_NET", "2"), "the environment variable SET_BY_NET"),
        (edited("net.py", READER + "# edited"), None),
    ],
)
def test_data_that_a_model_reads_is_noticed_when_it_changes(
    change: Callable[[pytest.MonkeyPatch], object],
    told: str | None,
    store: Cache,
    reader: Question,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    store = replace(store, notify=heard.append)
    reader.keep(traced(), store)
    assert reader.find(store) is not None
    change(monkeypatch)
    assert reader.find(store) is None
    assert [one.removesuffix(" has changed").endswith(told or "") for one in heard] == (
        [True] if told else []
    )


def test_what_a_model_writes_and_what_it_does_not_read_is_no_part_of_it(
    store: Cache, reader: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.keep(traced(), store)
    Path("written.log").write_text("other")
    Path("beside.txt").write_text("1")
    monkeypatch.setenv("NOT_READ_BY_NET", "2")
    assert reader.find(store) is not None


def test_a_model_whose_data_changed_while_it_was_read_is_not_kept(
    store: Cache, reader: Question
) -> None:
    Path("rows/one.txt").write_text("changed while the model was traced")
    reader.keep(traced(), store)
    assert not sizes(store)


def test_another_torch_or_an_edited_autopar_finds_nothing(
    store: Cache, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    question.keep(traced(), store)
    versions = cache._versions()
    monkeypatch.setattr(cache, "_versions", lambda: (*versions, "of another torch"))
    assert question.find(store) is None


def test_files_of_others_are_never_removed(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.folder is not None
    store.folder.mkdir()
    (store.folder / "data.json").write_text("{}")
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    store.keep(CachedScript(text="pass", notes=()), "key")
    assert [one.name for one in store.folder.iterdir()] == ["data.json"]


def test_copies_inside_another_library_are_no_sources(tmp_path: Path) -> None:
    model_file = tmp_path / "model.py"
    model_file.write_text("")
    code = (
        "import sys, setuptools, more_itertools; from pathlib import Path; "
        "from autopar.planner.plan.files.cache import Sources; "
        "found = Sources.of(Path(sys.argv[1])).libraries; "
        "print('setuptools' in found, 'more-itertools' in found)"
    )
    command = [sys.executable, "-c", code, str(model_file)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "True False\n"
