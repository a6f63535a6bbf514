"""Recomputes layers in the backward, or keeps what they save in the host's memory.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.recompute.on_host import save_on_host
from autopar.runtime.recompute.running_again import recompute
from autopar.runtime.recompute.written_buffers import update_once

__all__ = ["recompute", "save_on_host", "update_once"]
