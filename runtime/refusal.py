"""Ends a script that cannot run as it was started: one message in the place of a traceback."""

import sys
from typing import NoReturn

MISMATCH = 6  # as autopar's commands have it: environment and plan do not match


def refuse(found: str, *, fix: str) -> NoReturn:
    """Say what was found and what to do, and leave; every rank does, for none may have a group."""
    leave(found, fix=fix)


def leave(found: str, *, fix: str, is_telling: bool = True) -> NoReturn:
    """Do the same where all ranks leave for one reason, of which the first tells."""
    if is_telling:
        print(f"error: {found}\n  fix: {fix}", file=sys.stderr, flush=True)
    raise SystemExit(MISMATCH)
