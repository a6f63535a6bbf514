"""Gives parameters their initial values, from the constructor or from files.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.weights.initial_weights import Recipe, record
from autopar.runtime.weights.loading import load_weights

__all__ = ["Recipe", "load_weights", "record"]
