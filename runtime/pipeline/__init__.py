"""Runs pipeline stages under torch's schedules.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.pipeline.schedules import *
from autopar.runtime.pipeline.stage import *
