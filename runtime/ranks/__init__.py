"""Handles the processes of a training: device mesh, options, random numbers, error messages.

Scripts import the names of the modules' `__all__` from here. The runtime's own files import from
the modules.
"""

from autopar.runtime.ranks.mesh import *
from autopar.runtime.ranks.options import *
from autopar.runtime.ranks.randomness import *
from autopar.runtime.ranks.user_code import *

join_streams()  # first of all, because a model file may print when it is imported
