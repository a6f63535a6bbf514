from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from autopar.planner.profile.measured import (
    FORMAT,
    MeasuredFile,
    content_hash,
    measurements_text,
    parse_measurements,
    read_measurements,
    write_measurements,
)
from tests.planner.profile.measurements import everything, op

TEXT = measurements_text(everything(), written="today")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "measured.toml"
    write_measurements(everything(), path)
    assert read_measurements(path) == everything()


def test_the_date_is_no_part_of_the_hash() -> None:
    assert content_hash(parse_measurements(TEXT, where="")) == content_hash(everything())
    assert measurements_text(everything(), written="tomorrow") != TEXT
    assert content_hash(MeasuredFile(ops=(op(2.0),))) != content_hash(MeasuredFile(ops=(op(),)))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "holds no measurements"),
        ("format = 1", "holds no measurements"),
        ("[[nodes]]\ndevice = 'cpu'", "holds no measurements"),
        ("format = [", "damaged or cut off"),
        (TEXT[: TEXT.index('"all-reduce"') + 4], "damaged"),
        (TEXT.replace(f"format = {FORMAT}", "format = 1"), "in format 1"),
        (TEXT.replace("samples = 9", "samples = 0"), "ops.0.samples"),
        (TEXT.replace("samples = 9", "sample = 9"), "ops.0.sample"),
        (TEXT.replace("shape = [8, 16]", "shape = [8.5, 16]"), "ops.0.key.operands.0.shape"),
        (TEXT.replace('precision = "fp32"', 'precision = "fp31"'), "'fp32', 'tf32', 'bf16'"),
        (TEXT.replace('"gloo"', '"mpi"'), "'nccl' or 'gloo'"),
        (TEXT.replace('"all-reduce"', '"all-out"'), "'all-reduce', 'all-gather'"),
        (TEXT.replace("step_seconds = 6e-05", "step_seconds = nan"), "hosts.0.times.step_seconds"),
        (TEXT.replace("[1000000, 0.003]", "[100, 0.003]"), "do not rise"),
        (TEXT.replace("[1000000, 0.003]", "[1000000, 0.0001]"), "do not rise"),
        (TEXT.replace("[1000000, 0.003]", "[1000000]"), "nets.0.collectives.0.points.1"),
        (TEXT.replace('written = "today"', "written = 2026-01-01"), "written"),
    ],
)
def test_what_is_no_sound_file_is_told_in_one_message(source: str, told: str) -> None:
    with pytest.raises(InputError, match=r"measured\.toml") as raised:
        parse_measurements(source, where="measured.toml")
    assert told in raised.value.found


def test_a_file_of_a_newer_autopar_says_to_update() -> None:
    with pytest.raises(InputError, match="update autopar"):
        parse_measurements(TEXT.replace(f"format = {FORMAT}", "format = 99"), where="m")


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_measurements(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read_measurements(tmp_path / "bytes.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_measurements(tmp_path)
