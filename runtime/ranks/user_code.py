"""Turns an error in the code of the model file into one message, with the line that raised it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.runtime.ranks.refusal import refuse

_OURS, _STANDARD = Path(__file__).parents[1], sysconfig.get_path("stdlib")


@contextmanager
def told(what: str) -> Iterator[None]:
    """Leave where the code inside raises an error; `what` names it, as "build_dataset()"."""
    try:
        yield
    except Exception as error:
        refuse(f"{what} fails: {_said(error)}", fix=f"look at {_place(error)}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]


def _place(error: Exception) -> str:
    """Return the innermost line that is neither of a library nor of the runtime."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        one
        for one in frames
        if "site-packages" not in one.filename
        and not one.filename.startswith(_STANDARD)
        and _OURS not in Path(one.filename).parents
    ]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
