"""The modules that a rank holds, and the classes that they take.

Scripts import from here; files import from each other.
"""

from autopar.runtime.model.apart import keep_apart
from autopar.runtime.model.layer_names import named, numbered
from autopar.runtime.model.parts import (
    ROWS,
    Crossing,
    StagePart,
    freeze,
    names_of,
    submodules,
    take_classes,
)

__all__ = [
    "ROWS",
    "Crossing",
    "StagePart",
    "freeze",
    "keep_apart",
    "named",
    "names_of",
    "numbered",
    "submodules",
    "take_classes",
]
