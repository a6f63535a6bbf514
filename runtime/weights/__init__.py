"""Gives parameters their initial values, from the constructor or from files.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.weights.initial_weights import *
from autopar.runtime.weights.loading import *
