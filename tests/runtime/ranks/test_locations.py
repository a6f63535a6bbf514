"""Places for files: one set of verbs for disks and for stores, and what is told of other places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.runtime.ranks.locations import (
    Location,
    StorePath,
    located,
    location,
    put,
    size_of,
    write,
    written_at,
)
from tests.bucket import bucket

PLACES: dict[str, Callable[[Path], Location]] = {
    "disk": lambda folder: folder / "run",
    "bucket": bucket,
    "memory": lambda folder: location(f"memory://{folder}/run/"),
    "store with folders": lambda folder: location(f"local://{folder}/run"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_files_are_written_listed_moved_and_removed(kind: str, tmp_path: Path) -> None:
    run = PLACES[kind](tmp_path)
    assert not run.exists()
    assert located(run, "*") == []
    for name in ("step-12", "step-1"):
        (run / name).mkdir(parents=True)
        write(run / name / "a.bin", [b"abc", memoryview(b"def")])
    one = run / "step-1" / "a.bin"
    assert (one.suffix, one.parent, one.read_text()) == (".bin", run / "step-1", "abcdef")
    assert (size_of(one), one.is_file(), run.is_dir(), run.is_file()) == (6, True, True, False)
    assert abs(written_at(one) - written_at(run / "step-12" / "a.bin")) < 5
    write(one.with_name("b"), [b"old"])
    put(one, one.with_name("b"))
    assert {one.name: one.read_text() for one in (run / "step-1").iterdir()} == {"b": "abcdef"}
    put(run / "step-1", run / "step-1.broken")
    assert [one.name for one in located(run, "step-1*")] == [
        *(["step-1"] if kind == "store with folders" else []),
        "step-1.broken",
        "step-12",
    ]
    (run / "step-1.broken" / "b").unlink()
    assert (run / "step-12" / "a.bin").exists()
    with pytest.raises(FileNotFoundError):
        size_of(run / "step-1.broken" / "b")


def test_what_goes_wrong_in_a_store_is_an_os_error_that_says_where(tmp_path: Path) -> None:
    run = bucket(tmp_path)
    run.write([b"x"])
    with pytest.raises(OSError, match="cannot be opened with ab") as told, run.open("ab"):
        pass
    assert (told.value.filename, bool(told.value.strerror)) == (run.url, True)

    def blocks() -> list[bytes]:
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        write(run, (block for block in blocks()))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nowhere://x/run", "Protocol not known: nowhere"),
        ("dropbox://x/run", "pip install what fsspec reads it with"),
        ("s3://", "names no place in a store"),
        ("memory://run[1]/x", "without * ? ["),
    ],
)
def test_a_place_that_nothing_reads_is_told_at_once(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        location(text)
    assert left.value.code == 6
    assert told in capsys.readouterr().err


def test_a_place_is_the_same_for_ranks_that_send_it(tmp_path: Path) -> None:
    run = bucket(tmp_path)
    assert (run / "step-1").parent == run.resolve() == StorePath(str(run))


def test_what_cannot_be_opened_stays_and_half_a_file_goes(tmp_path: Path) -> None:
    loop, half = tmp_path / "loop", tmp_path / "half"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="loop"):
        write(loop, [b"abc"])
    assert loop.is_symlink()

    def breaking() -> Iterator[bytes]:
        yield b"abc"
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        write(half, breaking())
    assert not half.exists()
