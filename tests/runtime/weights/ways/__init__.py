"""Ways in which people fill a model: each builds one in a folder that has some files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from tests.runtime.weights.ways import by_hand, drawn, from_arrays, from_files, hanging, pretrained

Way = Callable[[Path], nn.Module]

# The same in every plain call: they draw nothing, or from a state that they set themselves.
CERTAIN: Mapping[str, Way] = {
    **by_hand.CERTAIN,
    **from_arrays.CERTAIN,
    **from_files.CERTAIN,
    **hanging.CERTAIN,
    **drawn.CERTAIN,
    **pretrained.CERTAIN,
}
# These draw numbers without a seed of their own.
DRAWN: Mapping[str, Way] = {**by_hand.DRAWN, **drawn.DRAWN, **pretrained.DRAWN}
EVERY: Mapping[str, Way] = {**CERTAIN, **DRAWN}
