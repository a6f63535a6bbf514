"""Prepares the modules that a rank holds: classes, shards, pipeline stages.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.model.parts import *
from autopar.runtime.tensor.shards import expand as expand
