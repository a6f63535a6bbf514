"""Clips gradients, steps the optimizer on a rank's shards, and averages replicas.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.optimizer.building import *
from autopar.runtime.optimizer.gradients import *
from autopar.runtime.optimizer.outer import *
