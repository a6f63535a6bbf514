"""The table, third part: what one rank, or all of them, find while they train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRanks:
    """A fault of the model file, if any, options, and what all ranks leave with.

    `at_rank` is the one rank that has the fault; None: all of them. `plan` are pins of one of the
    scripts that stand there.
    """

    message: str
    code: int
    words: str = ""
    fault: str = ""
    at_rank: int | None = None
    plan: str = "dp=2"


def _of_options() -> dict[str, OnRanks]:
    """Return options, and places that the first rank alone looks at."""
    return {
        words: OnRanks(words=words, message=message, code=code)
        for words, message, code in (
            ("--workers 100000", "argument --workers: 100000 is more than", 2),
            ("--stepz 3", "unrecognized arguments: --stepz 3", 2),
            ("--steps -1", "argument --steps: -1 is not a whole number", 2),
            ("--checkpoint ''", "argument --checkpoint: it is empty", 2),
            ("--export /proc/here/", "nothing can be written to /proc/here", 6),
            ("--export /dev/null/w.safetensors", "nothing can be written to /dev/null", 6),
            ("--export faulty.py/", "faulty.py is a file", 6),
            ("--checkpoint /proc/here", "nothing can be written to /proc/here", 6),
            ("--checkpoint faulty.py/", "faulty.py is a file", 6),
            ("--metrics faulty.py", "faulty.py has no lines of metrics", 6),
            ("--metrics /proc/here/m.jsonl", "nothing can be written to /proc/here/m.jsonl", 6),
            ("--tensorboard curves", "--tensorboard needs a package that cannot be imported", 6),
            ("--resume nothing/step-3", "nothing/step-3 exists", 6),
            ("--resume faulty.py", "faulty.py is a file, and a checkpoint is a folder", 6),
            ("--weights nothing.safetensors", "there is no nothing.safetensors", 6),
            ("--weights faulty.py", "faulty.py is not a whole .safetensors file", 6),
        )
    }


def _of_files() -> dict[str, OnRanks]:
    """Return faults of the model file on all ranks."""
    return {
        fault: OnRanks(fault=fault, message=message, code=code)
        for fault, message, code in (
            ("import", "ModuleNotFoundError: No module named 'no_such_package'", 7),
            ("build_model", "ValueError: no model", 7),
            ("build_dataset", "build_dataset() of the model file fails: OSError: no disk", 6),
            ("no dataset", "the dataset (NoneType) gives no row for an index", 6),
            (
                "length -3",
                "the length of the dataset (Rows) is invalid: __len__() should return",
                6,
            ),
            ("length 6.5", "'float' object cannot be interpreted as an integer", 6),
            ("length 0", "the dataset (Rows) is empty", 6),
            ("length 10^12", "has 1,000,000,000,000 rows, and 1,000,000,000 are the most", 6),
            ("build_optimizer", "build_optimizer() of the model file fails: ValueError: no opt", 6),
            ("no optimizer", "returns a NoneType, which is no torch.optim.Optimizer", 6),
            ("twice", "some parameters appear in more than one parameter group", 6),
            ("build_scheduler", "build_scheduler() of the model file fails: ValueError: no sch", 6),
            ("ends", "fails in step 3 of 4: ValueError: Tried to step 3 times", 6),
            ("schedule", "fails in step 2 of 4: ZeroDivisionError: division by zero", 6),
            ("metrics", "metrics() of the model file fails: KeyError: 'nothing'", 6),
            ("a single number", "'hits' of metrics() is a single number", 6),
            ("no rows to evaluate", "the dataset (list) is empty", 6),
            ("stream", "", 0),
        )
    }


def _of_one_rank() -> dict[str, OnRanks]:
    """Return faults of the model file on one rank: the others wait for it in a message."""
    return {
        f"{fault} at rank {rank} under {plan}": OnRanks(
            fault=fault, message=message, code=code, at_rank=rank, plan=plan
        )
        for plan, fault, rank, message, code in (
            ("dp=2", "key", 1, "a row of the dataset (Rows) has ids, but no labels", 6),
            ("dp=2", "dtype", 0, "'labels' is float32[6] in a row of the dataset (Rows)", 6),
            ("dp=2", "shape", 1, "'labels' is [2] in one row of the dataset and [6] in another", 6),
            ("dp=2", "none", 0, "a row of the dataset (Rows) is a NoneType", 6),
            ("dp=2", "text", 1, "'labels' in a row of the dataset (Rows) is a str", 6),
            ("dp=2", "raises", 0, "reading a row of the dataset (Rows) fails: KeyError: 'the", 6),
            (
                "dp=2",
                "exits",
                1,
                "a row of the dataset (Rows) ends the process (exit 0)",
                6,
            ),
            ("dp=2", "target", 1, "rank 1: IndexError: Target 1000 is out of bounds", 7),
            ("dp=2", "id", 0, "rank 0: IndexError: index out of range in self", 7),
            ("dp=2", "length", 1, "build_dataset() returns 64 rows on rank 0 and 65 on rank 1", 6),
            ("dp=2", "other steps", 1, "0 and 1 were started with different values of --steps", 6),
            ("dp=2", "other data", 1, "0 and 1 were started with different values of --data", 6),
            ("dp=2", "other checkpoint", 1, "different values of --checkpoint", 6),
            ("dp=2", "other export", 1, "different values of --export", 6),
            ("dp=2", "other rate", 1, "makes different optimizers on the ranks: lr differ", 6),
            ("dp=2,tp=2", "other optimizer", 3, "on the ranks: classes differ", 6),
            ("dp=2", "forward", 1, "rank 1: RuntimeError: no forward", 7),
            ("dp=2", "forward exits", 0, "the process ends before its training is over", 7),
            ("dp=2,tp=2", "build_model", 3, "rank 3: ValueError: no model", 7),
            ("dp=2,tp=2", "dims", 2, "'labels' is int64[1, 6] in a row of the dataset (Rows)", 6),
            ("dp=2,tp=2", "step", 1, "rank 1: ZeroDivisionError: no step", 7),
            ("pp=2", "step", 1, "rank 1: ZeroDivisionError: no step", 7),
            ("pp=2", "raises", 1, "reading a row of the dataset (Rows) fails: KeyError: 'the", 6),
        )
    }


ON_RANKS = {**_of_options(), **_of_files(), **_of_one_rank()}
