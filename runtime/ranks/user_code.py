"""Reports errors in the user's files, and changes to these files since the script was written."""

from __future__ import annotations

import ast
import atexit
import hashlib
import inspect
import logging
import os
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import ModuleType, NoneType, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.runtime.ranks.leaving import (
    FAILED,
    MISMATCH,
    ExitReason,
    LeavingError,
    end_all_if_early,
    leave,
    leave_interrupted,
    refuse,
    say,
    write_beside_logs,
)
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.transport import differing

__all__ = ["refuse_changes", "tell_errors_once", "warn_if_changed"]  # for scripts

SHOWS_TRACEBACK = "AUTOPAR_TRACEBACK"  # an environment variable
_RUNTIME = Path(__file__).parents[1]
_TORCH, _STANDARD = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")
_MOST_CHARACTERS = 300  # of an error message

# Messages for known errors, found by words in their text: gloo and DataLoader only raise
# RuntimeError.
_KNOWN = (
    (
        ("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
        "another rank has ended without telling why",
        "look at what it has printed; a process that was killed often lacked memory",
    ),
    (
        ("DataLoader worker (pid",),
        "a process that reads rows ahead (--workers) has ended",
        "--workers 0 reads them here and shows why; one that was killed often lacked memory",
    ),
    (
        ("out of memory",),
        "the device has too little memory",
        "autopar dryrun tells what a rank needs; plan again with a smaller limit or microbatch",
    ),
)


class _LineOrigin(Enum):
    """The origin of a line of a traceback."""

    LIBRARY = auto()
    RUNTIME = auto()
    USER = auto()  # the model file, what it imports, and the script


@contextmanager
def exit_on_error(what: str, of: Callable[..., Any] | None = None) -> Iterator[None]:
    """Exit if the code inside raises an error; `what` names the code, such as "build_dataset()".

    `of` is the user's function to name if the traceback has no line of the user's code.
    """
    try:
        yield
    except LeavingError:
        raise
    except SystemExit as error:
        _refuse(f"{what} ends the process (exit {error.code})", error, of)
    except Exception as error:
        _refuse(f"{what} fails: {said_of(error)}", error, of)


def _refuse(found: str, error: BaseException, of: Callable[..., Any] | None) -> NoReturn:
    refuse(found, fix=_look_at(failing_at(error) or place_of(of) or _place(error), error))


def _look_at(place: str, error: BaseException) -> str:
    """Return what to do about an error that the user's code raised at a place."""
    is_of_file = type(error) in (OSError, FileNotFoundError)  # transformers raise both
    return f"look at {place}" + (
        "; a relative path starts in the working directory" if is_of_file else ""
    )


def place_of(function: Callable[..., Any] | None) -> str:
    """Return where the user's function is defined, or "" if it is not the user's."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code is None or _whose(code.co_filename) is not _LineOrigin.USER:
        return ""
    return f"{Path(code.co_filename).resolve()}, line {code.co_firstlineno}"


def tell_errors_once() -> None:
    """Print an uncaught error as one message for all ranks, not as a traceback on each.

    All ranks exit with the message of the first rank that fails. A process that exits without an
    error before its training is over prints a message, too.
    """
    # torch's pipelines would log the error, too
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)

    def tell(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
        try:
            _tell(error)
        except KeyboardInterrupt:  # the error itself, or a Ctrl-C meanwhile
            leave_interrupted()

    sys.excepthook = tell
    atexit.register(end_all_if_early)


def _tell(error: BaseException) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = "".join(traceback.format_exception(error)).rstrip()
    write_beside_logs("traceback.txt", text)
    if os.environ.get(SHOWS_TRACEBACK):
        say(text)
    leave(verdict_of(error))


def verdict_of(error: BaseException) -> ExitReason:
    """Return the message for an error that ends a training."""
    first = _first_cause(error)
    said = said_of(first)
    own = [one for one in _lines(first) if one.whose is _LineOrigin.USER]
    if isinstance(first, ModuleNotFoundError) and own and own[-1].is_of_loop:
        found = f"the model file (module {first.name}) is not in {Path(sys.path[0]).resolve()}"
        return ExitReason(
            MISMATCH,
            found,
            "bring it back, or write the script again where it is now: "
            "autopar emit plan.json --model PATH",
        )
    for words, found, fix in _KNOWN:
        if any(word in said for word in words):
            return ExitReason(FAILED, found, fix)
    has_others = dist.is_initialized() and dist.get_world_size() > 1
    found = f"rank {dist.get_rank()}: {said}" if has_others else said
    is_ours = any(one.whose is _LineOrigin.RUNTIME for one in _lines(first))
    maybe = "this may be a fault of autopar's: " if is_ours else ""
    place = failing_at(first) or f"{maybe}{_place(first)}"
    return ExitReason(
        FAILED, found, f"{_look_at(place, first)}; {SHOWS_TRACEBACK}=1 shows the whole traceback"
    )


def _first_cause(error: BaseException) -> BaseException:
    """Return the user's error that caused a library's error, as in torch's pipelines.

    An error that was raised outside of libraries is returned itself.
    """
    cause = error.__cause__
    raised = [one.whose for one in _lines(error)][-1:]
    if cause is None or raised != [_LineOrigin.LIBRARY] or not failing_at(cause):
        return error
    return _first_cause(cause)


def said_of(error: BaseException) -> str:
    """Return an error in one line."""
    try:
        text = str(error).strip()
    except Exception:  # the text of an error may be computed and fail
        text = ""
    line = next(iter(text.splitlines()), "")
    return f"{type(error).__name__}: {line}".rstrip(": ")[:_MOST_CHARACTERS]


def failing_at(error: BaseException) -> str:
    """Return the innermost line of the user's code outside the script's loop, or ""."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    own = [
        str(one) for one in _lines(error) if one.whose is _LineOrigin.USER and not one.is_of_loop
    ]
    return own[-1] if own else ""


def _place(error: BaseException) -> str:
    """Return the innermost line outside libraries, or the innermost line of all."""
    lines = list(_lines(error))
    own = [one for one in lines if one.whose is not _LineOrigin.LIBRARY]
    return str((own or lines)[-1])


class _Line(NamedTuple):
    """A line of a traceback."""

    whose: _LineOrigin
    file: str
    number: int | None
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).resolve()}, line {self.number}"

    @property
    def is_of_loop(self) -> bool:
        """Whether the line is in the script's training loop, which calls the runtime."""
        is_script = Path(self.file).resolve() == Path(sys.argv[0]).resolve()
        return is_script and self.function in ("<module>", "main", "<genexpr>")


def _lines(error: BaseException) -> Iterator[_Line]:
    for one in traceback.extract_tb(error.__traceback__):
        is_mode = one.name in ("__torch_dispatch__", "__torch_function__")
        whose = _LineOrigin.LIBRARY if is_mode else _whose(one.filename)
        yield _Line(whose, one.filename, one.lineno, one.name)


def _whose(file: str) -> _LineOrigin:
    if "site-packages" in file or "dist-packages" in file:
        return _LineOrigin.LIBRARY
    if file.startswith((_TORCH, _STANDARD, "<")):
        return _LineOrigin.LIBRARY
    return _LineOrigin.RUNTIME if _RUNTIME in Path(file).parents else _LineOrigin.USER


def source_digest(paths: Iterable[Path]) -> str:
    """Return a digest of the code in files, in this order; comments and docstrings do not count."""
    digest = hashlib.sha256()
    for path in paths:
        code = repr(_code(ast.parse(path.read_bytes())))
        digest.update(hashlib.sha256(code.encode()).digest())
    return digest.hexdigest()[:16]


def _code(node: Any) -> Any:
    """Return a syntax tree as plain values, without positions and docstrings.

    Fields without a value are left out, because other versions of Python have more of them.
    """
    if isinstance(node, list):
        return [_code(one) for one in node if not _is_docstring(one)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, _code(value)) for name, value in ast.iter_fields(node))
    return type(node).__name__, [one for one in fields if one[1] is not None and one[1] != []]


def _is_docstring(node: Any) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def warn_if_changed(model_file: ModuleType, names: Iterable[str], digest: str, mesh: Mesh) -> None:
    """Print a note on the first rank if the model file, or a file it imports, has changed.

    `names` are relative to the folder of the model file.
    """
    found = _changed(model_file, names, digest)
    if found:
        mesh.say(
            f"note: {found[0]}: the script's plan and figures are for the old model file\n"
            "  fix: plan again with `autopar plan`"
        )


def refuse_changes(model_file: ModuleType, names: Iterable[str], digest: str) -> None:
    """Exit if the model file, or a file it imports, has changed: the script's forwards are old."""
    found = _changed(model_file, names, digest)
    if found:
        refuse(
            f"{found[0]}, and the script contains forwards of the old classes",
            fix="plan again with `autopar plan`; if no forward has changed, set MODEL_DIGEST in "
            f'the script to "{found[1]}"',
        )


def _changed(model_file: ModuleType, names: Iterable[str], digest: str) -> tuple[str, str] | None:
    """Return a sentence on the change and the new digest, or None without a change."""
    path = Path(str(model_file.__file__))
    files = [path.parent / name for name in names]
    if not all(file.is_file() for file in files):
        return None
    now = source_digest(files)
    imported = ", or a file that it imports," if len(files) > 1 else ""
    told = f"{path.name}{imported} has changed since this script was written"
    return (told, now) if now != digest else None


CPU_BY_FORMULA = "cpu by formula"  # a CPU that was not profiled when the plan was made


def note_device(planned: str, mesh: Mesh) -> None:
    """Print a note on the first rank if a script that was planned for GPUs runs on a CPU."""
    is_elsewhere = not planned.startswith("cpu") and mesh.device.type == "cpu"
    if is_elsewhere and not mesh.is_dry_run:
        mesh.say(
            f"note: the plan is for {planned}, and this is a CPU: it computes the same losses, but "
            "times and memory differ"
        )


def fault_of_optimizer(optimizer: Any) -> str:
    """Return why no script can step an optimizer, or ""."""
    if not isinstance(optimizer, Optimizer):
        return f"returns a {type(optimizer).__name__}, which is no torch.optim.Optimizer"
    counts = Counter(id(one) for group in optimizer.param_groups for one in group["params"])
    twice = sum(count > 1 for count in counts.values())
    return f"gives the optimizer {twice} parameters more than once" if twice else ""


def check_same_optimizer(optimizer: Optimizer, mesh: Mesh) -> None:
    """Exit if ranks that train the same layers have optimizers of other classes or settings."""
    groups = [{k: v for k, v in one.items() if k != "params"} for one in optimizer.param_groups]
    names = sorted({name for group in groups for name in group})
    kind = {"classes": type(optimizer).__qualname__, "groups": [[*one] for one in groups]}
    settings = {name: [_plain(group.get(name)) for group in groups] for name in names}
    # groups come first: only if they are equal do all ranks have equally many settings
    for facts in (kind, settings):
        own = [mixed_seed(*repr(fact).encode()) for fact in facts.values()]
        for axis in (mesh.data, mesh.tensor):
            others = [[*facts][place] for place in differing(own, axis, mesh)]
            if others:
                refuse(
                    "build_optimizer() of the model file makes different optimizers on the ranks: "
                    f"{', '.join(others)} differ",
                    fix="let it make the same on every rank: it may not depend on the process, its "
                    "environment or the clock",
                )


def _plain(setting: object) -> object:
    """Return a setting of an optimizer, or its type if its text may name a place in memory."""
    value = setting.tolist() if isinstance(setting, Tensor) else setting
    is_plain = isinstance(value, (bool, int, float, str, NoneType))
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if is_plain else type(value).__qualname__
