"""Handles the processes of a training: device mesh, options, random numbers, error messages.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.ranks.mesh import Axis, Mesh, join_streams, start, stop
from autopar.runtime.ranks.options import read_options
from autopar.runtime.ranks.randomness import seed_all, split_randomness
from autopar.runtime.ranks.user_code import refuse_changes, tell_errors_once, warn_if_changed

__all__ = [
    "Axis",
    "Mesh",
    "read_options",
    "refuse_changes",
    "seed_all",
    "split_randomness",
    "start",
    "stop",
    "tell_errors_once",
    "warn_if_changed",
]

join_streams()  # first of all, because a model file may print when it is imported
