"""A name in the zoo to the loaded model file, as a person who runs it by its path would get it."""

import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parents[2] / "models_zoo"

MODEL_FILES = (
    "gpt2",
    "llama",
    "bert",
    "t5",
    "vit",
    "resnet",
    "mnist",
    "intent",
    "dlrm",
    "transformer_lm",
)


@cache
def load(name: str) -> Any:
    """Import the file by its path, with its folder on sys.path for its neighbours."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"zoo_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def call(factory: Any, *positional: Any, **arguments: Any) -> Any:
    """Call a function of a model file with those of the arguments that it names."""
    known = inspect.signature(factory).parameters
    return factory(*positional, **{k: v for k, v in arguments.items() if k in known})


class WithLoss(nn.Module):
    """A model and its file's loss as one module from a batch to a number."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.file, self.model = load(name), model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = call(self.model.forward, **batch)
        loss: Tensor = self.file.loss(outputs, batch) if hasattr(self.file, "loss") else outputs
        return loss


def tiny(name: str) -> WithLoss:
    """Return the tiny model of a file, always the same."""
    torch.manual_seed(0)
    return WithLoss(name, load(name).build_model())


def in_double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with its real numbers in float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
