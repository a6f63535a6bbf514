"""No text becomes more than a word: it is read back as it was, or refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest
import yaml as pyyaml

from autopar.codegen.launch.settings import KEYS, QUOTING, LaunchSettings, read_settings
from autopar.planner.errors import InputError

HOSTILE = (
    "$(touch hacked)",
    "`touch hacked`",
    "a; touch hacked",
    "a && touch hacked",
    "a | touch hacked",
    "a\ntouch hacked",
    "a\r\n#SBATCH --wrap=hacked",
    "a\0b",
    "'; touch hacked; '",
    '"; touch hacked; "',
    "\\'; touch hacked",
    "${HOME}",
    "$HOME",
    "~root",
    "*",
    "a b",
    "-rf",
    "#comment",
    "a: {b: c}",
    "- a",
    "!!python/object/apply:os.system [touch hacked]",
    "&anchor *anchor",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "yes",
    "null",
    "1e3",
    "0x10",
    "a: b # c",
    "a\u2028b: c",
    "a\u0085b: c",
    "\ufeffa",
    "\ud800",
    "<script>alert(1)</script>",
    "..",
    "../../etc/passwd",
    "a\tb",
    "$(POD_NAME)",
    "\x1b[31mred",
    "x" * 5000,
    "",
    "é × ü",
)


def test_there_are_forty_tries() -> None:
    assert len(set(HOSTILE)) >= 40


@pytest.mark.parametrize("text", HOSTILE)
def test_a_shell_reads_back_the_text(text: str) -> None:
    try:
        quoted = QUOTING["shell"](text)
    except InputError:
        assert not text.isprintable() or len(text) > 4096
        return
    assert shlex.split(quoted) == [text]
    told = subprocess.run(
        ["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True
    )
    assert told.stdout == text


@pytest.mark.parametrize("text", HOSTILE)
def test_yaml_reads_back_the_text(text: str) -> None:
    try:
        quoted = QUOTING["yaml"](text)
    except InputError:
        assert not text.isprintable() or len(text) > 4096
        return
    assert pyyaml.safe_load(f"before: {quoted}\nafter: 1") == {"before": text, "after": 1}
    assert pyyaml.safe_load(f"{quoted}: 1") == {text: 1}
    assert pyyaml.safe_load(QUOTING["pod_argument"](text)).replace("$$(", "$(") == text
    assert not re.search(r"(?<!\$)\$\(", QUOTING["pod_argument"](text))


@pytest.mark.parametrize("text", HOSTILE)
def test_lines_without_quotes_have_harmless_words_alone(text: str) -> None:
    harmless = {"", "yes", "null", "1e3", "0x10", ".."}
    for quote, wrapped in ((QUOTING["directive"], f"--partition={text}"), (QUOTING["image"], text)):
        try:
            quoted = quote(wrapped)
        except InputError:
            continue
        assert quoted == wrapped
        assert text in harmless or text in ("-rf", "../../etc/passwd")
    try:
        assert json.loads(QUOTING["copied"]([text])) == [text]
    except InputError:
        return
    assert not set(text) & set("$*?[ \"'\n")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_dockerfiles_command_reads_back_the_text(text: str) -> None:
    try:
        quoted = QUOTING["command"](["torchrun", text])
    except InputError:
        assert not text.isprintable() or len(text) > 4096
        return
    assert json.loads(quoted) == ["torchrun", text]
    assert "\n" not in quoted


@pytest.mark.parametrize("text", HOSTILE)
def test_settings_are_what_their_keys_say_or_refused_together(text: str) -> None:
    plain = {"yes", "null", "1e3", "0x10", "a b"}
    for key, one in KEYS.items():
        if key == "python" or text in plain:
            continue
        for target in one.targets:
            with pytest.raises(InputError, match=f"{key} "):
                read_settings(target, [f"{key}={text}"])


def test_faults_in_settings_are_told_together() -> None:
    with pytest.raises(InputError) as caught:
        read_settings("slurm", ["partition=a b", "time=soon", "colour=red", "image=x", "account"])
    told = str(caught.value)
    for fault in ("partition", "time", "'colour' is no key", "image is for", "'account' has no ="):
        assert fault in told


@pytest.mark.parametrize(
    ("time", "seconds"), [("00:30:00", 1800), ("100:00:00", 360_000), ("2-01:00:01", 176_401)]
)
def test_a_time_limit_is_read_in_seconds(time: str, seconds: int) -> None:
    assert LaunchSettings(time=time).time_seconds == seconds
