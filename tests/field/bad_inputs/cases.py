"""The table: an input, the command that is given it, the exit code, a line of its message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.autopar.mistakes import MODEL
from tests.random_edits import HOSTILE


class Special(StrEnum):
    """A file that is none."""

    PIPE = "a pipe"
    LOOP = "a loop of links"
    ZERO = "a link to /dev/zero"
    LINK = "a link to the folder others"
    GONE = "a link to nothing"


Content = str | bytes | Special


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Files that lie in a folder, a command there, its exit code, and a part of what it says.

    `plan` are changes of plan.json: a path such as "machines.nodes" and what is put there.
    `checkpoint` are those of the manifest of CK/step-4, `record` those of mine/run.json; both are
    there where they are not None. `makes` are the names that a command may leave.
    """

    command: str
    code: int = 2
    message: str
    files: dict[str, Content] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    makes: tuple[str, ...] = ()


BOM = b"\xef\xbb\xbf"
CLUSTER = b'[[nodes]]\ndevice = "cpu"\ndevices = 2\n'
LONG = "x" * 300
PLANNING = "plan model.py --gpus 2 --device cpu -o out"


def _model(
    addition: str, message: str, *, code: int = 2, command: str = "inspect model.py"
) -> Case:
    return Case(
        command=command, code=code, message=message, files={"model.py": f"{MODEL}\n{addition}\n"}
    )


def _unread(name: str, command: str) -> Iterator[tuple[str, Case]]:
    """Yield what is no file, in the place of one that a command reads."""
    for special, message in (
        (Special.PIPE, f"{name} is a pipe"),
        (Special.LOOP, "Too many levels of symbolic links"),
        (Special.ZERO, f"{name} is a device"),
    ):
        files: dict[str, str | bytes | Special] = {"model.py": MODEL, name: special}
        yield f"{special} as {name}", Case(command=command, message=message, files=files)


MODELS = {
    "os._exit": _model("import os; os._exit(0)", "the model file ends the process (os._exit(0))"),
    "os._exit in a factory": _model(
        "import os\ndef build_model(): os._exit(3)", "the model file ends the process (os._exit(3))"
    ),
    "sys.exit": _model("import sys; sys.exit()", "ended the process (exit None)"),
    "os.chdir": _model("import os; os.chdir('/')", "4 layers", code=0),
    "prints": _model("print('hello')", "hello\n", code=0),
    "an error without a text": _model(
        "class E(Exception):\n    def __str__(self): raise E\nraise E",
        "failed: E: (its __str__ raises E)",
    ),
    "frames of C++": _model(
        "raise RuntimeError('no\\nException raised from f at f.cpp:3 (most recent call first):')",
        "importing model.py failed: RuntimeError: no\n",
    ),
    "a module in itself": _model(
        "def build_model():\n    made = Model()\n    made.embed.me = made\n    return made",
        "embed.me is a module that contains itself",
    ),
    "the batch key self": _model(
        "def example_batch(n): return {'self': torch.randn(n, 4)}", "the batch has the key 'self'"
    ),
    "a wrong size": _model(
        "def example_batch(n): return {'x': torch.randn(n, 5)}",
        "sizes that go with the batch, where x is [B, 5]",
        code=4,
    ),
    "a hostile key": _model(
        f"def example_batch(n): return {{{HOSTILE!r}: torch.randn(n, 4)}}", "the batch has the key"
    ),
    "a name too long": Case(command=f"inspect {LONG}.py", message="File name too long"),
    "an output too long": _model("", "File name too long", command=f"{PLANNING}{LONG}"),
    "a million processes": _model(
        "", "'1000000' is out of range", command="profile model.py --net --procs 1000000"
    ),
    **dict(_unread("model.py", "inspect model.py")),
}

FILES = {
    "a cluster with a BOM": Case(
        command=f"{PLANNING} --cluster c.toml".replace("--gpus 2 --device cpu ", ""),
        code=0,
        message="Written: out/plan.json",
        files={"model.py": MODEL, "c.toml": BOM + CLUSTER},
    ),
    "constraints with a BOM": Case(
        command=f"{PLANNING} --constraints c.toml",
        code=0,
        message="Written: out/plan.json",
        files={"model.py": MODEL, "c.toml": BOM + b"[pins]\ntp = 2\n"},
    ),
    "a cluster with a number of 5,000 digits": Case(
        command="plan model.py --cluster c.toml",
        message="not a valid TOML file: Exceeds the limit",
        files={"model.py": MODEL, "c.toml": CLUSTER.replace(b"2", b"9" * 5000)},
    ),
    "a cluster of a billion devices": Case(
        command="plan model.py --cluster c.toml",
        message="expected: at most 262144",
        files={"model.py": MODEL, "c.toml": CLUSTER.replace(b"2", b"1000000000")},
    ),
    **dict(_unread("c.toml", "plan model.py --cluster c.toml")),
    **dict(_unread("d.toml", "plan model.py --gpus 2 --constraints d.toml")),
    **dict(_unread("measured.toml", "plan model.py --gpus 2 --profile measured.toml")),
    **dict(_unread("p.json", "explain p.json")),
}


def _edit(path: str, value: object, message: str) -> tuple[str, Case]:
    shown = json.dumps(value)
    return f"{path} = {shown[:30]}", Case(
        command="emit plan.json", message=message, plan={path: value}
    )


PLANS = dict(
    (
        _edit("proof.search_seconds", -1.0, "proof.search_seconds: Input should be greater"),
        _edit("prediction.step_seconds", 5.0, "but prediction.step_seconds is 5"),
        _edit("layouts.0.rows.0.0", "?", "layouts.0.0.letter: aten.linear.default has no letter"),
        _edit("layouts.0.rows.0.3.0", "S(d0@7)", "layouts.0.0.gives.0: "),
        _edit("layouts.0.rows.0.3.0", "S(d0)", "layouts.0.rows.0.3.0: String should match"),
        _edit("parameters", {"nobody": "I"}, "parameters.0: the graph has no parameter 'nobody'"),
        _edit("parameters", {}, "parameters: the layout of "),
        _edit("autopar", HOSTILE, "is no version"),
        _edit("model.name", "x" * 200_000, "model.name: String should have at most 100000"),
        _edit("model.spec", LONG + ".py", "File name too long"),
        _edit("model.has_scheduler", True, "model.has_scheduler is True, but the model file says"),
    )
)

CASES = {**MODELS, **FILES, **PLANS}
