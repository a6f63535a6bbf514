"""Recomputes layers in the backward, or keeps their saved tensors in the host's memory.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.recompute.on_host import *
from autopar.runtime.recompute.running_again import *
from autopar.runtime.recompute.written_buffers import *
