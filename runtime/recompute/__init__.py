"""Recomputes layers in the backward.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.recompute.running_again import recompute
from autopar.runtime.recompute.written_buffers import update_once

__all__ = ["recompute", "update_once"]
