"""Runs the code of a model file, and tells whatever it raises as one clear message."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autopar.planner.errors import AutoparError, InputError, text_of
from autopar.planner.model.containing import contained
from autopar.planner.model.import_name import import_name
from autopar.planner.model.remedies import ON_DEVICE, remedy, told

CONTRACT = "a model file defines build_model() -> nn.Module and example_batch(batch_size) -> dict"
_PLANNER = Path(__file__).parents[1]


class ModelMovedError(InputError):
    """The model file puts its model on a device, which is the script's to choose."""


@contextmanager
def guarded(doing: str, path: Path, passed: Sequence[Any] = ()) -> Iterator[None]:
    """Tell whatever the user's code raises as one clear message."""
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
        raise InputError(found, where=where, expected=told(name, passed), fix=fix) from error


@contextmanager
def no_process_group(path: Path) -> Iterator[None]:
    """Refuse a process group: planning happens in one process, before any group exists."""
    import torch.distributed as dist
    from torch.distributed import device_mesh

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError(
            "the model file starts a process group",
            where=f"{path}",
            expected="no torch.distributed at import or in build_model",
            fix="leave it out: the emitted script starts the process group",
        )

    holders = (dist, dist.distributed_c10d, device_mesh)
    with ExitStack() as patches:
        for holder in holders:
            patches.enter_context(patch.object(holder, "init_process_group", refuse))
        yield


@contextmanager
def not_moved(path: Path) -> Iterator[None]:
    """Refuse that the model file's own code moves a module to a device, whichever is there."""
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
            patches.enter_context(patch.object(nn.Module, name, refused(name)))
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Have functions that a model file compiles by torch.jit stay Python, which can be traced."""
    import torch

    plain = torch.jit.script

    def script(obj: Any, *positional: Any, **named: Any) -> Any:
        return obj if inspect.isfunction(obj) else plain(obj, *positional, **named)

    with patch.object(torch.jit, "script", script):
        yield


def user_location(error: BaseException, path: Path) -> str:
    """Return file:line of the innermost frame in the model file or its neighbours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename, path)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)


def _is_own(filename: str, path: Path) -> bool:
    """Whether a frame is the user's: in the folder of the model file, but no installed package."""
    if _PLANNER in Path(filename).parents or "site-packages" in filename:
        return False
    return import_name(path).home in Path(filename).parents
