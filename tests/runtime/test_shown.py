"""What a terminal and a file may show: passwords in URLs are masked, control characters spelled."""

from __future__ import annotations

import io
import os

import pytest

from autopar.runtime.ranks.leaving import say
from autopar.runtime.texts import in_a_line, masked, masked_variable, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://key:secret@bucket/run", "s3://key:***@bucket/run"),
        ("s3://key:a/b+c@d@bucket/run", "s3://key:***@bucket/run"),  # keys of s3 have slashes
        ("redis://:word@host:6379/0 is full", "redis://:***@host:6379/0 is full"),
        ("https://token@host/x", "https://***@host/x"),
        ("az://c/x?sv=1&sig=abc%3D&se=2", "az://c/x?sv=1&sig=***&se=2"),
        ("https://h/x?X-Amz-Credential=a/b&X-Amz-Signature=c", None),
        ('{"a": "s3://u:p@h/x", "b": "me@home"}', '{"a": "s3://u:***@h/x", "b": "me@home"}'),
        ("s3://bucket/run", "s3://bucket/run"),
        ("hdfs://node:8020/user/run", "hdfs://node:8020/user/run"),
        ("abfs://container@account.dfs/x", "abfs://container@account.dfs/x"),
        ("me@home: 3:4@5", "me@home: 3:4@5"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, shown: str | None) -> None:
    expected = "https://h/x?X-Amz-Credential=***&X-Amz-Signature=***" if shown is None else shown
    assert masked(text) == expected
    assert masked(masked(text)) == expected


def test_a_variable_that_is_called_a_secret_is_masked() -> None:
    assert masked_variable("TORCH_HUB_TOKEN", "abc") == "***"
    assert masked_variable("NCCL_DEBUG", "INFO") == "INFO"
    assert masked_variable("CUDA_CACHE", "http://u:p@h") == "http://u:***@h"


def test_names_of_others_give_a_terminal_no_orders() -> None:
    assert plain("a\x1b[31mb\nc\td") == "a\\x1b[31mb\nc\td"
    assert in_a_line("a\nerror: b\x1b") == "a\\nerror: b\\x1b"


def test_lines_on_a_full_disk_are_lost_and_end_nothing() -> None:
    full = io.TextIOWrapper(io.FileIO(os.open("/dev/full", os.O_WRONLY), "w"), write_through=True)
    say("step 1", full)
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):  # nobody reads the lines of this training any more
        say("step 1", io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True))
