"""Prepares the modules that a rank holds: classes, shards, pipeline stages.

Scripts import from here; the runtime's own files import from the modules.
"""

from autopar.runtime.model.parts import (
    ROWS,
    Crossing,
    StagePart,
    compile_layers,
    freeze,
    keep_apart,
    shard_parameters,
    submodules,
    use_classes,
    use_float8,
)
from autopar.runtime.tensor.shards import expand

__all__ = [
    "ROWS",
    "Crossing",
    "StagePart",
    "compile_layers",
    "expand",
    "freeze",
    "keep_apart",
    "shard_parameters",
    "submodules",
    "use_classes",
    "use_float8",
]
