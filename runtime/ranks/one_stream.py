"""Sends what a rank prints to stderr where its stdout goes: both keep the order of their lines."""

from __future__ import annotations

import os
import sys

from autopar.runtime.ranks.leaving import RUN_TOKEN

_STDOUT, _STDERR = 1, 2


def join_streams() -> None:
    """Do so in a rank that `autopar run` has started; all other processes keep both streams.

    torchrun follows a file for each stream, and shows what is new in each of them now and then.
    """
    if RUN_TOKEN in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(_STDOUT, _STDERR)
