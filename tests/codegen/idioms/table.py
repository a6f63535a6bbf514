"""The table of idioms: what people write in a model file, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.codegen.idioms.batches import BATCHES
from tests.codegen.idioms.evaluations import EVALUATIONS
from tests.codegen.idioms.forwards import FORWARDS
from tests.codegen.idioms.hooks import GRADIENTS, HOOKS
from tests.codegen.idioms.losses import LOSSES
from tests.codegen.idioms.optimizers import OPTIMIZERS
from tests.codegen.idioms.outcomes import Idiom
from tests.codegen.idioms.states import MODES, STATES
from tests.codegen.idioms.weights import WEIGHTS

_PARTS = {
    "weights": WEIGHTS,
    "batch": BATCHES,
    "loss": LOSSES,
    "forward": FORWARDS,
    "hook": HOOKS,
    "gradient": GRADIENTS,
    "state": STATES,
    "mode": MODES,
    "optimizer": OPTIMIZERS,
    "evaluation": EVALUATIONS,
}
IDIOMS: Mapping[str, Idiom] = MappingProxyType(
    {f"{part}: {name}": one for part, idioms in _PARTS.items() for name, one in idioms.items()}
)
