"""Has Linux tell a process when its parent is gone, killed with -9 included."""

from __future__ import annotations

import ctypes
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
_prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None


def stop_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it ends; elsewhere than on Linux, no.

    Without it the ranks of a torchrun that was killed would train on, and nobody would know.
    """
    if _prctl is not None:
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
