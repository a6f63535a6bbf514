"""Two trainings in one folder: they notice each other, and no dead one is in the way."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autopar.runtime.checkpointing import claim as claiming
from autopar.runtime.checkpointing.claim import (
    NAME,
    Claim,
    FolderHolder,
    TakenError,
    began,
    claim,
    holder_of,
    is_claimed,
)
from autopar.runtime.ranks.locations import Location, write
from tests.bucket import bucket

PLACES: list[Callable[[Path], Location]] = [Path, bucket]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hearts beat ten times a second."""
    for name, seconds in (("BEAT", 0.1), ("_SETTLING", 0.05), ("_POLL", 0.05)):
        monkeypatch.setattr(claiming, f"{name}_SECONDS", seconds)


def leave(folder: Location, **changes: object) -> FolderHolder:
    """Leave the claim of another process: of the one that has started this one, if no other."""
    process = os.getppid()
    made = replace(claiming._own(folder), process=process, began=began(process))
    made = replace(made, **changes)  # type: ignore[arg-type]
    write(folder / NAME, [json.dumps(asdict(made)).encode()])
    return made


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_is_one_process_s_until_it_gives_it_back(
    place: Callable[[Path], Location], tmp_path: Path
) -> None:
    folder = place(tmp_path)
    folder.mkdir(exist_ok=True)
    own = claim(folder)
    found = holder_of(folder)
    assert found is not None
    assert (found.process, is_claimed(folder)) == (os.getpid(), True)
    own.release()
    assert not (folder / NAME).exists()
    leave(folder)
    with pytest.raises(TakenError, match=f"process {os.getppid()} on "):
        claim(folder)


@pytest.mark.parametrize("place", PLACES)
def test_a_dead_process_of_this_machine_is_not_waited_for(
    place: Callable[[Path], Location], tmp_path: Path
) -> None:
    folder = place(tmp_path)
    folder.mkdir(exist_ok=True)
    for changes in ({"process": 2**22 + 1}, {"began": 1}):  # none, or a later one of that number
        leave(folder, **changes)
        assert not is_claimed(folder)
        claim(folder).release()


@pytest.mark.parametrize("place", PLACES)
def test_a_process_elsewhere_is_alive_while_its_heart_beats(
    place: Callable[[Path], Location], tmp_path: Path
) -> None:
    folder, notes = place(tmp_path), list[str]()
    folder.mkdir(exist_ok=True)
    leave(folder, host="elsewhere")
    begun = time.monotonic()
    claim(folder, note=notes.append).release()
    assert time.monotonic() - begun >= 4 * 0.1
    assert notes == [
        f"{folder} is claimed by process {os.getppid()} on elsewhere: waiting 0 s to see whether "
        "it still runs"
    ]
    own = os.getpid()  # whose heart stops when it gives the folder back
    other = Claim(folder, leave(folder, host="elsewhere", process=own, began=began(own)))
    with pytest.raises(TakenError):
        claim(folder)
    other.release()
    assert holder_of(folder) is None


def test_a_process_that_was_taken_for_dead_notices(tmp_path: Path) -> None:
    own = claim(tmp_path)
    leave(tmp_path)
    deadline = time.monotonic() + 60
    while not own.is_lost and time.monotonic() < deadline:
        time.sleep(0.02)
    assert own.is_lost
    own.release()
    assert holder_of(tmp_path) is not None, "the file is the other's"


def test_a_copy_of_a_folder_is_free(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    leave(tmp_path / "a")
    (tmp_path / "a" / NAME).rename(tmp_path / "b" / NAME)
    assert not is_claimed(tmp_path / "b")
    (tmp_path / "a").rmdir()
    assert is_claimed(tmp_path / "b"), "it was moved there"


@pytest.mark.parametrize("content", [b"", b"mine", b"[" * 9000, b'{"word": 3}'])
def test_a_damaged_file_holds_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    claim(tmp_path).release()


def test_a_claim_that_nobody_has_any_more_is_given_back(tmp_path: Path) -> None:
    own = claim(tmp_path)
    assert (tmp_path / NAME).exists()
    del own
    assert not (tmp_path / NAME).exists()
