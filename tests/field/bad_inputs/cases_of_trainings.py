"""The table, second part: scripts, runs, checkpoints, and what people name as their output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save

from tests.autopar.mistakes import MODEL
from tests.field.bad_inputs.cases import Case, Content, Special

WHOLE: dict[str, Any] = {}  # a checkpoint, or a record, as it was written
SHARD = "CK/step-4/rank-00000.safetensors"
CUT = '{"time": 1.0, "eve'
STEP = '{"time": 1.0, "step": 3, "loss": 1.0, "seconds": 0.5}'
DEEP = "[" * 100_000
NAN = save({"embed.weight": torch.full((8, 4), torch.nan)})
HOSTILE_NAME = save({"\x1b[31m\nall is well": torch.zeros(1)})
PIPE: dict[str, Content] = {"pipe": Special.PIPE}


def _script(words: str, message: str, *, code: int = 2, **more: Any) -> Case:
    """Return a case of a training by a script on one rank."""
    return Case(
        command=f"train.py --steps 1 --export none {words}", message=message, code=code, **more
    )


def _empty(words: str, name: str, **more: Any) -> Case:
    return Case(command=words, message=f"{name} is empty", **more)


def _options() -> Iterator[tuple[str, Case]]:
    """Yield options of scripts that are empty, and numbers that no training has."""
    for name in (
        "--resume", "--checkpoint", "--export", "--metrics", "--weights", "--tensorboard",
        "--allow-missing", "--steps", "--seed",
    ):  # fmt: skip
        yield f"an empty {name}", _script(f"{name} ''", f"argument {name}: it is empty")
        yield f"an empty {name}=", _script(f"{name}=", f"argument {name}: it is empty")
    for words, message in (
        ("--steps 1000000000000000000000000000000", "is more than 1,000,000,000"),
        ("--seed 18446744073709551616", "is more than 9,223,372,036,854,775,807"),
        ("--seed -1", "-1 is not a whole number of 0 or more"),
        ("--lr -1", "-1 is not a number of 0 or more"),
        ("--lr nan", "nan is not a number of 0 or more"),
        ("--lr inf", "inf is more than 1e+06"),
        ("--clip nan", "nan is not a number of 0 or more"),
        ("--steps 0", "--steps: 0 is not a whole number of 1 or more"),
        ("--steps few", "--steps: few is not a whole number"),
        ("--stesp 3", "unrecognized arguments: --stesp"),
        ("--clip -1", "argument --clip: -1 is not a number of 0 or more"),
        ("--dtype fp16", "invalid choice: 'fp16'"),
        ("--log-every 0", "0 is not a whole number of 1 or more"),
        ("--timeout 99999999999999999999", "is more than 10,000,000"),
        ("--keep 0", "0 is not a whole number of 1 or more"),
        ("--profile-step 1e3", "1e3 is not a whole number"),
        ("--checkpoint-every 5 --keep-every 7", "--keep-every 7 is no multiple of"),
        ("--early-stop 2", "unrecognized arguments: --early-stop"),
        ("--metr m.jsonl", "unrecognized arguments: --metr"),
        ("--epochs 2", "unrecognized arguments: --epochs"),
        ("--last-rows pad", "unrecognized arguments: --last-rows"),
        ("--betas 0.9", "argument --betas: expected 2 arguments"),
        ("--betas 0.9 1", "argument --betas: 1 is not a number below 1"),
        ("--betas nan 0.9", "argument --betas: nan is not a number of 0 or more"),
        ("--weight-decay -1", "argument --weight-decay: -1 is not a number of 0 or more"),
        ("--warmup-steps 1.5", "argument --warmup-steps: 1.5 is not a whole number"),
        ("--checkpoint-minutes 0", "argument --checkpoint-minutes: 0 is not a number of 0.01"),
        ("--checkpoint-minutes 1e9", "argument --checkpoint-minutes: 1e9 is more than 1e+06"),
        ("--export-best", "unrecognized arguments: --export-best"),
        ("--dtype float16", "--dtype float16: this script is written for float32"),
    ):
        yield words, _script(words, message)


def _outputs() -> Iterator[tuple[str, Case]]:
    """Yield places for output where something else lies, or is expected."""
    kept: dict[str, Any] = {"checkpoint": WHOLE}
    inside = "is in the checkpoint"
    for words, code in (
        (f"ckpt export CK -o {SHARD}", 6),
        ("ckpt export CK -o CK/step-4", 6),
        ("ckpt export CK -o CK/step-4/out", 6),
        ("ckpt export CK -o CK/step-9/new.safetensors", 6),
        ("plan model.py --gpus 1 --device cpu -o CK/step-4", 2),
        ("emit plan.json --force -o CK/step-4/checkpoint.json", 2),
        ("inspect model.py --graph CK/step-4/graph.dot", 2),
        ("run . --runs CK/step-4", 2),
    ):
        yield (
            words,
            Case(command=words, code=code, message=inside, files={"model.py": MODEL}, **kept),
        )
    for words in (
        f"--export {SHARD}",
        "--export CK/step-4/out/",
        "--metrics CK/step-4/checkpoint.json",
        "--metrics CK/step-4/new.jsonl",
        "--tensorboard CK/step-4",
        "--checkpoint CK/step-4",
    ):
        yield words, _script(words, inside, code=6, **kept)
    own = "--checkpoint own --export own/step-1/w.safetensors"
    yield own, _script(own, inside, code=6, makes=("own",))
    for words, message in (
        ("--export w.bin", "w.bin is the name of a file, and weights are .safetensors"),
        ("--checkpoint kept.json", "kept.json is the name of a file"),
        ("--tensorboard curves.txt", "curves.txt is the name of a file"),
    ):
        yield words, _script(words, message)
    for words, message in (
        ("ckpt export CK -o w.pt", "w.pt is the name of a file"),
        ("plan model.py --gpus 1 -o plan.yaml", "-o plan.yaml names a file"),
        ("emit plan.json --standalone -o alone.zip", "-o alone.zip names a file"),
        ("run . --runs runs.txt", "runs.txt names a file"),
    ):
        yield words, Case(command=words, message=message, files={"model.py": MODEL}, **kept)
    for words, message in (
        ("--metrics model.py", "model.py has no lines of metrics"),
        ("--metrics plan.json", "plan.json has no lines of metrics"),
        ("--metrics CK", "CK is a folder"),
        ("--metrics pipe", "it is a pipe, a device or a socket"),
        ("--metrics /dev/zero", "it is a pipe, a device or a socket"),
        ("--checkpoint model.py/", "model.py is a file"),
        ("--checkpoint pipe", "it is a pipe"),
        ("--tensorboard pipe", "it is a pipe"),
        ("--export pipe", "it is a pipe"),
        ("--export mine.safetensors", "mine.safetensors is there, and autopar has not exported it"),
        ("--export fifo.safetensors", "it is a pipe"),
        ("--export folder/", "model.safetensors is there, and autopar has not exported it"),
        ("--weights folder", "it is a pipe"),
        ("--weights fifo.safetensors", "it is a pipe"),
    ):
        files: dict[str, Content] = {
            **PIPE,
            "mine.safetensors": b"mine",
            "fifo.safetensors": Special.PIPE,
            "folder/model.safetensors": Special.PIPE,
        }
        yield words, _script(words, message, code=6, files=files, **kept)


def _forged(message: str, edits: Mapping[str, Any], command: str) -> Case:
    is_listed = command.startswith(("ckpt ls", "ckpt diff")) and "diff" not in command
    return Case(
        command=command, code=0 if is_listed else 6, message=message, checkpoint=dict(edits)
    )


def _checkpoints() -> Iterator[tuple[str, Case]]:
    """Yield manifests that somebody has made up, each signed as autopar signs its own."""
    weight = "tensors.weight/embed~weight"
    halves = [
        {"file": "rank-00000.safetensors", "entry": "weight/embed.weight@0", "ranges": ranges}
        for ranges in ([[[0, 5]], [[0, 4]]], [[[4, 8]], [[0, 4]]])
    ]
    outside = [{**halves[0], "file": "../../outside.safetensors"}]
    for message, edits in (
        ("which is none of the files", {f"{weight}.shards": outside}),
        ("its shards hold 32 of 4,000,000,000,000,000,000", {f"{weight}.shape": [10**18, 4]}),
        ("-8 is not 0 or more", {f"{weight}.shape": [-8, 4]}),
        ("ranges that do not fit a dim of 8", {f"{weight}.shards.0.ranges.0": [[0, 9]]}),
        ("-1 is not 0 or more", {f"{weight}.shards.0.ranges.0": [[-1, 7]]}),
        ("ranges that do not fit a dim of 8", {f"{weight}.shards.0.ranges.0": [[8, 0]]}),
        ("its shards hold 36 of 32 elements", {f"{weight}.shards": halves}),
        ("a shard has 1 dims, and the tensor 2", {f"{weight}.shards.0.ranges": [[[0, 8]]]}),
        ("'F99' is not a type of elements", {f"{weight}.dtype": "F99"}),
        ("its shards hold 32 of 64 elements", {f"{weight}.shape": [16, 4]}),
        ("-3 is not 0 to 1,000,000,000", {"moment.step": -3}),
        ("is not 0 to 1,000,000,000", {"moment.step": 10**30}),
        ("checkpoint.json is of step 5", {"moment.step": 5}),
        ("moment.updates: more updates than steps", {"moment.updates": 5}),
        ("moment.rows: 'many' is not a whole number", {"moment.rows": "many"}),
        ("origin: 3 is not an object", {"origin": 3}),
        ("origin.degrees: 'dp\\n2' is not a line", {"origin.degrees": "dp\n2"}),
        ("files: their names are not those of ranks", {"files": {}}),
        ("there is no such field", {"moment.mine": 1}),
        ("tensors: [] is not an object", {"tensors": []}),
        ("no number that an", {"scalars": {"state/step/x": {"value": 1, "dtype": "load"}}}),
        ("no number that an o", {"scalars": {"state/step/y": {"value": "1"}}}),
        ("no number that an op", {"scalars": {"state/step/z": {"value": "inf", "dtype": "int8"}}}),
        ("no weight of this name and", {"exported": {"x": {"dtype": "F32", "aliases": []}}}),
        ("is of format 2, and this reads 1", {"format": 2}),
    ):
        for command in ("ckpt ls CK", "ckpt verify CK", "ckpt export CK -o out.safetensors"):
            name = f"{command}: {message} {next(iter(edits))}"
            yield name, _forged(message, edits, command)
        script = "--resume CK/step-4 --checkpoint own"
        yield (
            f"train.py: {message} {next(iter(edits))}",
            _script(script, message, code=6, checkpoint=dict(edits), makes=("own",)),
        )
    step = f"{weight}.dtype"
    for command in ("ckpt verify CK", "ckpt diff CK CK"):
        yield (
            f"{command}: another type",
            _forged("has another type or shape", {step: "F16"}, command),
        )
    for content, message in (
        (DEEP, "checkpoint.json is no description of a checkpoint"),
        (Special.PIPE, "checkpoint.json cannot be read: it is a pipe"),
        (Special.ZERO, "checkpoint.json cannot be read: it is a pipe, a device"),
        (b"\xff\xfe", "checkpoint.json is no description of a checkpoint"),
    ):
        for command, code in (("ckpt ls CK/step-7", 0), ("ckpt export CK/step-7", 6)):
            files: dict[str, Content] = {"CK/step-7/checkpoint.json": content}
            name = f"{command}: {str(content)[:10]}"
            yield name, Case(command=command, code=code, message=message, files=files)
    yield (
        "a shard that is a pipe",
        Case(
            command="ckpt verify CK",
            code=6,
            message="rank-00000.safetensors cannot be read: it is a pipe",
            checkpoint=WHOLE,
            files={SHARD: Special.PIPE},
        ),
    )


def _runs() -> Iterator[tuple[str, Case]]:
    """Yield folders, records and metrics of runs that are none, or were changed."""
    for name, message, edits in (
        ("a time", "started_at: Input should be a valid number", {"started_at": "noon"}),
        ("a late time", "started_at: Input should be less than", {"started_at": 1e30}),
        ("a state", "state: Input should be 'running'", {"state": "sleeping"}),
        ("a list", "plan: Input should be a valid string", {"plan": []}),
        ("a field", "mine: Unexpected keyword argument", {"mine": 1}),
    ):
        yield f"a record: {name}", Case(command="runs mine", message=message, record=edits)
    listed = "bad is left out: the record of a run is no text in UTF-8"
    yield (
        "a record that is no text",
        Case(
            command="runs .",
            code=0,
            message=listed,
            record=WHOLE,
            files={"bad/run.json": b"\xff\xfe", "other/run.json": "{}"},
        ),
    )
    for line, message in (
        ('{"time": 1.0, "step": "three"}', "step: Input should be a valid integer"),
        ('{"time": 1.0, "step": 3, "seconds": "long"}', "seconds: Input should be a valid number"),
        ('{"time": 1.0, "step": 3, "seconds": -1.0}', "seconds: Input should be greater than 0"),
        ('{"time": 1.0, "event": "profiled", "step": 3}', "ranks: Field required"),
        ('{"time": 1.0, "event": "kept"}', "seconds: Field required"),
        ("[1]", "not a JSON object"),
    ):
        analyzed = "explain plan.json --analyze m.jsonl"
        lines = {"m.jsonl": f"{STEP}\n{line}\n{CUT}"}
        yield f"metrics: {line}", Case(command=analyzed, message=message, files={**lines})
        mine = {"mine/metrics.jsonl": f"{STEP}\n{line}\n"}
        name = f"metrics of a run: {line}"
        yield (
            name,
            Case(command="runs mine", code=0, message="3   1.0", record=WHOLE, files={**mine}),
        )
    foreign = "is there, and is no folder of a run"
    for files in ({"mine/notes.txt": ""}, {"mine/train.py": "mine"}, {"mine": "a file"}):
        name = f"a run in a folder that is none: {next(iter(files))}"
        yield name, Case(command="run . --runs . --name mine", message=foreign, files={**files})


EMPTY = {
    f"{words} {name}": _empty(words, name, files={"model.py": MODEL})
    for words, name in (
        ("run . --name ''", "--name"),
        ("run . --runs=", "--runs"),
        ("run . -- --checkpoint ''", "--checkpoint"),
        ("run ''", "an argument"),
        ("ckpt export CK -o ''", "-o"),
        ("ckpt ls ''", "an argument"),
        ("plan model.py --gpus ''", "--gpus"),
        ("plan model.py --gpus 1 -o ''", "-o"),
        ("plan model.py --gpus 1 --cluster ' '", "--cluster"),
        ("emit plan.json --model ''", "--model"),
        ("inspect ''", "an argument"),
    )
}

TILDES = {
    words: Case(command=words, message=f'fix: write "$HOME/{name}"', files={"model.py": MODEL})
    for words, name in (
        ("plan model.py --gpus 1 --output=~/out", "out"),
        ("plan ~/model.py --gpus 1", "model.py"),
        ("plan model.py --gpus 1 --arg base=~/llama", "llama"),
        ("run . -- --weights=~/llama", "llama"),
    )
}

OTHERS = {
    "restarts by a float": Case(
        command="run . --max-restarts 1e3", message="'1e3' is not a whole number"
    ),
    "endless restarts": Case(
        command=f"run . --max-restarts {10**30}", message=f"'{10**30}' is out of range"
    ),
    "a million GPUs": Case(command="run . --gpus 1000000", message="'1000000' is out of range"),
    **{
        f"{command} -- {words}": Case(command=f"{command} -- {words}", message=message)
        for command in ("run .", "emit plan.json --for slurm --print", "emit . --for slurm")
        for words, message in (
            ("--stepz 3", "unrecognized arguments: --stepz 3"),
            ("--steps x", "argument --steps: x is not a whole number of 1 or more"),
            ("--keep-every 7", "--keep-every 7 is no multiple of --checkpoint-every 1000"),
        )
    },
    "an output through a link to nothing": Case(
        command="report plan.json -o link/r.html",
        message="link is a link to what is not there",
        files={"link": Special.GONE},
    ),
    "measurements into another file": Case(
        command="profile model.py -o plan.json", message="fix: choose another file with -o"
    ),
    "weights of nan": _script(
        "--weights nan.safetensors --allow-missing *",
        "1 of 8 parameters of rank 0 are nan or infinite, such as embed.weight before the first",
        code=6,
        files={"nan.safetensors": NAN},
    ),
    "a hostile name in weights": _script(
        "--weights w.safetensors",
        r"it has \x1b[31m\nall is well",
        code=6,
        files={"w.safetensors": HOSTILE_NAME},
    ),
    "a password": _script("--metrics http://me:secret@host/m", "http://me:***@host/m: stores can"),
    "a file of the user's beside an export": _script(
        "--export w.safetensors",
        "the trained weights are in",
        code=0,
        makes=("w.safetensors",),
        files={".w.safetensors.tmp": "mine"},
    ),
    "an edited plan beside its script": Case(
        command="run . --runs new",
        message="the script was not written from this plan",
        code=6,
        plan={"model.arguments": [["depth", "2"]]},
    ),
    "a run through a link": Case(
        command="run . --runs . --name link",
        message="is there, and is no folder of a run",
        files={"others/notes.txt": "", "link": Special.LINK},
    ),
}

TRAININGS = {
    **EMPTY,
    **TILDES,
    **OTHERS,
    **dict(_options()),
    **dict(_outputs()),
    **dict(_checkpoints()),
    **dict(_runs()),
}
