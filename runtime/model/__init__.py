"""Prepares the modules that a rank holds: classes, shards, pipeline stages.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.model.parts import *
from autopar.runtime.tensor.shards import expand as expand
