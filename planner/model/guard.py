"""Runs the code of a model file, contains its side effects, and reports its errors."""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, wraps
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from autopar.planner.errors import AutoparError, InputError, text_of

INIT = "__init__.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportName:
    """A module's name for an import statement: `myproj.model`, found in `folder`."""

    name: str
    folder: Path

    @property
    def home(self) -> Path:
        """The folder of the file; if `name` begins with a package, the package's folder."""
        top, dot, _ = self.name.partition(".")
        return self.folder / top if dot else self.folder


def import_name(path: Path) -> ImportName:
    """Return the name to import a file by.

    It begins with the file's package (`myproj.model`) if the file imports from this package. Else
    it is the file's name without `.py`.
    """
    parts, folder = [path.stem], path.parent
    while (folder / INIT).is_file() and folder != folder.parent:
        parts.insert(0, folder.name)
        folder = folder.parent
    if len(parts) > 1 and any(_is_of(parts[0], name) for name in imported_names(path)):
        return ImportName(name=".".join(parts), folder=folder)
    return ImportName(name=path.stem, folder=path.parent)


def folder_from(place: Path, path: Path) -> str:
    """Return the folder that a file is imported from, relative to that of a script at `place`."""
    return os.path.relpath(import_name(path).folder, place.parent)


def imported_names(path: Path) -> Sequence[str]:
    """Return all names that a file imports, with dots if relative; none for a broken file."""
    try:
        return _imports(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()


@lru_cache(maxsize=64)
def _imports(source: bytes) -> Sequence[str]:
    return tuple(_imported(ast.parse(source)))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            end = "" if module.endswith(".") else "."
            yield from (f"{module}{end}{alias.name}" for alias in node.names)


def _is_of(package: str, name: str) -> bool:
    return name.startswith((".", f"{package}.")) or name == package


@contextmanager
def contained(path: Path) -> Iterator[None]:
    """Send prints to stderr, refuse os._exit, and restore the working directory afterwards.

    A process that the body forks ends with the body.
    """
    process, folder, leave = os.getpid(), _folder(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a process started by multiprocessing
            leave(status)
        raise InputError(
            f"the model file ends the process (os._exit({status}))",
            where=str(path),
            fix='put what should only run as a script under `if __name__ == "__main__":`',
        )

    try:
        with redirect_stdout(sys.stderr), replaced(os, "_exit", refuse):
            yield
    finally:
        if os.getpid() != process:  # os.fork: only the original process continues the command
            leave(0)
        if folder is not None and folder != _folder():
            os.chdir(folder)


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - text, for a comparison
    except FileNotFoundError:
        return None  # the folder was removed


ON_DEVICE = "leave the device out: the emitted script moves the model and each batch"
_PLACE = "name a folder that is there (a relative path starts in the working directory) or"
_KNOWN = (
    ("Repo id must", f"{_PLACE} a model of the hub"),
    ("couldn't find them in the cached files", f"{_PLACE} a model that can be downloaded"),
    ("not compiled with CUDA", ON_DEVICE),
    ("Found no NVIDIA driver", ON_DEVICE),
    ("No CUDA GPUs are available", ON_DEVICE),
    (
        "no known parent package",
        "put an __init__.py beside the model file, so that its folder is a package; or import "
        "without the dot: the folder of the model file is on the path",
    ),
    (
        "can't allocate memory",
        "fill tensors by torch's ops alone (copy_, nn.init, load_state_dict): then planning needs "
        "no memory for them",
    ),
    (
        "beyond top-level package",
        "put an __init__.py into each folder from the imported package to the model file",
    ),
)


def refuse_no_python(path: Path, expected: str) -> NoReturn:
    """Raise for a model file that is no Python file: a plan, a notebook."""
    found, fix = f"{path} is not a Python file", ""
    if path.suffix == ".ipynb":
        fix = "jupyter nbconvert --to script makes a Python file of a notebook"
    elif path.suffix == ".json":
        fix = "a model file defines build_model and example_batch in Python"
        with suppress(ValueError, OSError, AttributeError, KeyError, TypeError):
            spec = json.loads(path.read_bytes())["model"]["spec"]
            found = f"{path} is a plan, of the model file {spec}"
            fix = (
                f"autopar plan {spec} plans again; autopar emit {path} writes the plan's script, "
                "and explain, verify, dryrun and run take it, too"
            )
    raise InputError(found, expected=expected, fix=fix)


def nearest_file(path: Path) -> str:
    """Return advice for a wrong path, such as the file that the user probably means."""
    module, _, function = path.name.rpartition(".")
    as_module = path.parent / f"{path.name.replace('.', '/')}.py"
    if module.endswith(".py") and (path.parent / module).is_file():
        return f"did you mean {path.parent / module}:{function}?"
    if as_module.is_file():
        return f"did you mean {as_module}?"
    folder = path.parent if path.parent.is_dir() else Path()
    near = get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    if path.suffix:
        return f"check the path: the working directory is {Path.cwd()}"
    return "write a model file; for one of Hugging Face see docs/model-file.md"


def instead_of(name: str, path: Path, module: ModuleType) -> str:
    """Return what to do about a missing function, judged by the functions that the file has."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    functions = [key for key, value in own.items() if inspect.isroutine(value)]
    near = get_close_matches(name, functions, n=1)
    if near:
        return f"did you mean {near[0]}?"
    classes = [
        key
        for key, value in own.items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    made = [one for one in functions if inspect.getmodule(own[one]) is module]
    if name == "build_model" and made:
        return f"define it, or name the function that builds the model: {path.name}:{made[0]}"
    if name == "build_model" and classes:
        return f"define it: def build_model(): return {classes[-1]}(…)"
    return f"define it in {path.name}"


def remedy(error: BaseException, path: Path) -> str:
    """Return what to do about an error, or ""; `path` is the model file."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing(error.name.partition(".")[0], path)
    text = text_of(error)
    return next((fix for telling, fix in _KNOWN if telling in text), "")


def call_in_words(name: str, passed: Sequence[Any]) -> str:
    """Describe the arguments of loss or metrics (outputs and batch); "" for other functions."""
    if len(passed) != 2:
        return ""
    outputs, batch = map(_in_words, passed)
    return f"called as {name}(outputs, batch): the outputs are {outputs}, the batch is {batch}"


def _in_words(value: Any) -> str:
    # imported here, because it takes a second that other commands do not need
    from torch import Tensor

    if isinstance(value, Tensor):
        sizes = (str(size) if type(size) is int else "rows" for size in value.shape)
        return f"a Tensor[{', '.join(sizes)}]"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _missing(name: str, path: Path) -> str:
    """Return how to make a module importable: PYTHONPATH, the right name, or an installation."""
    for folder in path.parents:
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            return f"run with PYTHONPATH={folder}, where {name} is"
    near = get_close_matches(name, packages_distributions(), n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? Otherwise " if near else ""
    return f"{meant}install the package that has it for {sys.executable}"


CONTRACT = "a model file defines build_model() -> nn.Module and example_batch(batch_size) -> dict"
_PLANNER = Path(__file__).parents[1]


class ModelMovedError(InputError):
    """The model file moves its model to a device, which is the script's job."""


@contextmanager
def guarded(doing: str, path: Path, passed: Sequence[Any] = ()) -> Iterator[None]:
    """Report every error of the user's code as one clear message."""
    try:
        with contained(path):
            yield
    except (AutoparError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename else str(path)
        raise InputError(f"{doing} failed: {error.msg}", where=where, expected=CONTRACT) from None
    except SystemExit as error:
        found = f"{doing} ended the process (exit {error.code})"
        fix = 'put what should only run as a script under `if __name__ == "__main__":`'
        raise InputError(found, where=user_location(error, path), fix=fix) from None
    except BaseException as error:
        where, fix = user_location(error, path), remedy(error, path)
        found = f"{doing} failed: {type(error).__name__}: {text_of(error)}".replace("FakeT", "T")
        name = doing.removeprefix("calling ")
        raise InputError(
            found, where=where, expected=call_in_words(name, passed), fix=fix
        ) from error


@contextmanager
def no_process_group(path: Path) -> Iterator[None]:
    """Raise if the model file starts a process group: planning runs in one process."""
    import torch.distributed as dist
    from torch.distributed import device_mesh

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError(
            "the model file starts a process group",
            where=str(path),
            expected="no torch.distributed at import or in build_model",
            fix="leave it out: the emitted script starts the process group",
        )

    holders = (dist, dist.distributed_c10d, device_mesh)
    with ExitStack() as patches:
        for holder in holders:
            patches.enter_context(replaced(holder, "init_process_group", refuse))
        yield


@contextmanager
def not_moved(path: Path) -> Iterator[None]:
    """Raise if the model file's own code moves a module to a device."""
    from torch import nn
    from torch._C._nn import _parse_to

    def moves(name: str, *args: Any, **kwargs: Any) -> bool:
        return name != "to" or _parse_to(*args, **kwargs)[0] is not None

    def refused(name: str) -> Callable[..., Any]:
        original = getattr(nn.Module, name)

        @wraps(original)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if _is_own(caller.f_code.co_filename, path) and moves(name, *args, **kwargs):
                raise ModelMovedError(
                    "the model file moves the model to a device",
                    where=f"{caller.f_code.co_filename}:{caller.f_lineno}",
                    fix=ON_DEVICE,
                )
            return original(module, *args, **kwargs)

        return move

    with ExitStack() as patches:
        for name in ("to", "cuda", "cpu"):
            patches.enter_context(replaced(nn.Module, name, refused(name)))
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Make `torch.jit.script` return Python functions unchanged: these can be traced."""
    import torch

    plain = torch.jit.script

    def script(obj: Any, *positional: Any, **named: Any) -> Any:
        return obj if inspect.isfunction(obj) else plain(obj, *positional, **named)

    with replaced(torch.jit, "script", script):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or a class within the body.

    `unittest.mock` could do so, too, but imports asyncio, which takes a tenth of a second.
    """
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def user_location(error: BaseException, path: Path) -> str:
    """Return file:line of the innermost frame in the model file or in others of its folder."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename, path)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)


def _is_own(filename: str, path: Path) -> bool:
    """Whether a frame is in the model file's folder, and not in an installed package."""
    if _PLANNER in Path(filename).parents or "site-packages" in filename:
        return False
    return import_name(path).home in Path(filename).parents
