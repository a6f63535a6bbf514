"""What the axes of each family's parameters are, by family name."""

from collections.abc import Mapping
from types import MappingProxyType

from tests.planner.huggingface.expectation import Expectation
from tests.planner.huggingface.expected_decoders import DECODERS
from tests.planner.huggingface.expected_encoders import ENCODERS
from tests.planner.huggingface.expected_vision import VISION

EXPECTATIONS: Mapping[str, tuple[Expectation, ...]] = MappingProxyType(
    {**DECODERS, **ENCODERS, **VISION}
)
