"""Says what to do about a model file that is not there, lacks something or raises an error."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import packages_distributions
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from autopar.planner.errors import text_of

ON_DEVICE = "leave the device out: the emitted script moves the model and each batch"
_KNOWN = (
    ("not compiled with CUDA", ON_DEVICE),
    ("Found no NVIDIA driver", ON_DEVICE),
    ("No CUDA GPUs are available", ON_DEVICE),
    (
        "no known parent package",
        "put an __init__.py beside the model file, which makes a package of its folder; or import "
        "it without the dot: the folder of the model file is on the path",
    ),
    (
        "can't allocate memory",
        "fill tensors by torch's ops alone (copy_, nn.init, load_state_dict): then planning needs "
        "no memory for them",
    ),
    (
        "beyond top-level package",
        "put an __init__.py into each folder from there down to the model file's",
    ),
)

INSTEAD = MappingProxyType(
    {
        ".ipynb": "jupyter nbconvert --to script makes a Python file of a notebook",
        ".json": "of a plan that is there, autopar emit, explain, verify and dryrun take the file",
    }
)


def nearest_file(path: Path) -> str:
    """Return where a file is that was meant by a wrong path, as far as it can be guessed."""
    module, _, function = path.name.rpartition(".")
    as_module = path.parent / f"{path.name.replace('.', '/')}.py"
    if module.endswith(".py") and (path.parent / module).is_file():
        return f"did you mean {path.parent / module}:{function}?"
    if as_module.is_file():
        return f"did you mean {as_module}?"
    folder = path.parent if path.parent.is_dir() else Path()
    near = get_close_matches(path.name, [p.name for p in folder.glob("*.py")], n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    if path.suffix:
        return f"check the path: it is seen from {Path.cwd()}"
    return "write a model file; for one of Hugging Face see docs/model-file.md"


def instead_of(name: str, path: Path, module: ModuleType) -> str:
    """Return what to do about a function that is not there, from what is."""
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    functions = [key for key, value in own.items() if inspect.isroutine(value)]
    near = get_close_matches(name, functions, n=1)
    if near:
        return f"did you mean {near[0]}?"
    classes = [
        key
        for key, value in own.items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    made = [one for one in functions if inspect.getmodule(own[one]) is module]
    if name == "build_model" and made:
        return f"define it, or name the function that builds the model: {path.name}:{made[0]}"
    if name == "build_model" and classes:
        return f"define it: def build_model(): return {classes[-1]}(…)"
    return f"define it in {path.name}"


def remedy(error: BaseException, path: Path) -> str:
    """Return what to do, or nothing; `path` is the model file."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing(error.name.partition(".")[0], path)
    text = text_of(error)
    return next((fix for telling, fix in _KNOWN if telling in text), "")


def told(name: str, passed: Sequence[Any]) -> str:
    """Return in words what loss or metrics was given: the outputs of the model, and the batch."""
    if len(passed) != 2:
        return ""
    outputs, batch = map(_in_words, passed)
    return f"called as {name}(outputs, batch): the outputs are {outputs}, the batch is {batch}"


def _in_words(value: Any) -> str:
    from torch import Tensor  # which takes a second that other commands need not wait

    if isinstance(value, Tensor):
        sizes = (str(size) if type(size) is int else "rows" for size in value.shape)
        return f"a Tensor[{', '.join(sizes)}]"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _missing(name: str, path: Path) -> str:
    """Return how to come by a module: from a folder above the file, by its right name, by pip."""
    for folder in path.parents:
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            return f"run with PYTHONPATH={folder}, where {name} is"
    near = get_close_matches(name, packages_distributions(), n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? Otherwise " if near else ""
    return f"{meant}install the package that has it for {sys.executable}"
