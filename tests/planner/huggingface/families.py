"""All families of Hugging Face models that the planner must understand, in tiny sizes."""

from tests.planner.huggingface.decoders import DECODERS
from tests.planner.huggingface.encoders import ENCODERS
from tests.planner.huggingface.family import Family
from tests.planner.huggingface.vision import VISION

FAMILIES: tuple[Family, ...] = (*DECODERS, *ENCODERS, *VISION)
