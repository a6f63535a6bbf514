"""Gives parameters their initial values, from the constructor or from files.

Scripts import from here what the modules list in `__all__`; the runtime's own files import from the
modules.
"""

from autopar.runtime.weights.initial_weights import *
from autopar.runtime.weights.loading import *
