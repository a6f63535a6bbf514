"""Runs pipeline stages under torch's schedules.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.pipeline.schedules import *
from autopar.runtime.pipeline.stage import *
