"""Recomputes layers in the backward, or keeps what they save in the host's memory.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.recompute.on_host import *
from autopar.runtime.recompute.running_again import *
from autopar.runtime.recompute.written_buffers import *
