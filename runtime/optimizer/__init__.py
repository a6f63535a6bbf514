"""Clips gradients, steps the optimizer on a rank's shards, and averages replicas.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.optimizer.building import *
from autopar.runtime.optimizer.gradients import *
from autopar.runtime.optimizer.outer import *
