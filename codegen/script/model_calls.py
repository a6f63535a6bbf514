"""Tells how a script imports the model file, and calls its functions with the planned arguments."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.codegen.forward.reading.imported import Imported
from autopar.codegen.forward.text.identifiers import is_identifier
from autopar.codegen.known_names import KNOWN
from autopar.codegen.python_text import (
    Group,
    Source,
    assigned,
    call,
    identifier,
    literal,
    remark,
    tuple_of,
)
from autopar.codegen.script.imports import sorted_imports
from autopar.planner.errors import InputError
from autopar.planner.graph import Graph, batch_key
from autopar.planner.model.import_name import import_name
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.sources import sources
from autopar.planner.ops import Ref
from autopar.runtime.ranks.model_source import source_digest

NOTHING: Mapping[str, Any] = MappingProxyType({})
MODULE = "model_file"  # the name that the script has for the model file

# What a script calls each function of a model file.
_OPTIONAL: Mapping[str, str] = {
    "build_dataset": "new_dataset",
    "build_eval_dataset": "new_eval_dataset",
    "build_collate": "new_collate",
    "build_optimizer": "new_optimizer",
    "build_scheduler": "new_scheduler",
}
_EVALUATING = ("build_eval_dataset",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """The parts of a script that deal with the model file."""

    imports: Source
    functions: Source
    loss: Source  # of `outputs` and `batch`


def model_calls(
    file: ModelFile,
    classes: Iterable[Imported],
    destination: Path,
    *,
    is_half: bool,
    evaluates: bool = True,
) -> ModelCalls:
    """Return how a script at `destination` imports a model file and calls its functions."""
    return ModelCalls(
        imports=_imports(file, sorted(set(classes)), destination),
        functions=Source("\n".join(_functions(file, is_half=is_half, evaluates=evaluates))),
        loss=Source("new_loss(outputs, batch)" if file.loss else "loss_in(outputs)"),
    )


def model_arguments(graph: Graph, *, takes_all: bool, has_weights: bool) -> Source:
    """Return the arguments that a script passes to the model: all of the batch, or parts of it."""
    keywords = graph.calls[""].keywords
    names = [name for name, value in keywords if isinstance(value, Ref)]
    plain = [f"{identifier(n)}={literal(v)}" for n, v in keywords if not isinstance(v, Ref)]
    if takes_all or (set(names) == set(map(batch_key, graph.inputs)) and not has_weights):
        parts = ["**batch"]
    else:
        parts = [f"{identifier(name)}=batch[{literal(name)}]" for name in names]
    return Source(", ".join([*parts, *plain]))


def _imports(file: ModelFile, classes: Sequence[Imported], destination: Path) -> Source:
    """Return the statements that import the model file, wherever the script is started."""
    known = import_name(file.path)
    folder = os.path.relpath(known.folder, destination.parent)
    here = "Path(__file__).resolve().parent"
    place = here if folder == "." else f"{here} / {literal(Path(folder).as_posix())}"
    lines, after = [], list[str]()
    is_plain = all(map(is_identifier, known.name.split(".")))
    if is_plain:
        lines.append(f"import {known.name} as {MODULE}")
    else:
        after.append(f"{MODULE} = importlib.import_module({literal(known.name)})")
    for one in classes:
        _check_name(one)
        outer, _, inner = one.qualname.partition(".")
        called = "" if one.name == outer else f" as {identifier(one.name)}"
        if one.module == known.name and (inner or not is_plain):
            after.append(f"{identifier(one.name)} = {MODULE}.{_dotted(one.qualname)}")
        elif inner:
            lines.append(f"from {_dotted(one.module)} import {identifier(outer)}")
            after.append(f"{identifier(one.name)} = {_dotted(one.qualname)}")
        else:
            lines.append(f"from {_dotted(one.module)} import {identifier(outer)}{called}")
    said = remark("where the model file is, seen from here: to be changed when either moves")
    path = f"{said}\n{call('sys.path.insert', '0', call('str', place)).laid_out()}"
    imported = sorted_imports(lines)
    parts = [path, *([imported] if imported else [])]
    return Source("\n".join([*parts, *(["", *after] if imported and after else after)]))


def _check_name(one: Imported) -> None:
    """Refuse a class that would hide what a script has under its name: an autograd Function."""
    if one.name in KNOWN:
        raise InputError(
            f"the plan needs {one.module}.{one.qualname}, and {one.name} is what the script calls "
            "its own",
            fix="give the class another name",
        )


def _dotted(module: str) -> str:
    return ".".join(identifier(part) for part in module.split("."))


def _functions(file: ModelFile, *, is_half: bool, evaluates: bool) -> Iterator[str]:
    """Yield `new_model = …` and the others that the model file has."""
    yield _bound(file, file.factory, "new_model")
    yield _bound(file, "example_batch", "new_batch")
    plain = file.plain_entries() if evaluates else NOTHING  # a plain loop says them itself
    around = "in_float32" if is_half else ""
    if file.loss is not None:
        yield _bound(file, "loss", "new_loss", around=around, plain=plain)
    if evaluates and file.metrics is not None:
        yield _bound(file, "metrics", "new_metrics", around=around, plain=plain)
    for name, own in _OPTIONAL.items():
        if getattr(file, name) is not None and (evaluates or name not in _EVALUATING):
            yield _bound(file, name, own)


def _bound(
    file: ModelFile, name: str, own: str, *, around: str = "", plain: Mapping[str, Any] = NOTHING
) -> str:
    """Return one function with its share of the arguments, as planning called it.

    `plain` is what its batch has that is no tensor.
    """
    function = getattr(sys.modules[import_name(file.path).name], name)
    parameters = inspect.signature(function).parameters
    share = [f"{identifier(k)}={literal(v)}" for k, v in file.arguments if k in parameters]
    made: Group | str = f"{MODULE}.{identifier(name)}"
    if share:
        made = call("partial", made, *share)
    if plain:
        given = (f"{identifier(k)}={literal(v)}" for k, v in plain.items())
        made = call("with_plain", made, *given)
    if around:
        made = call(around, made)
    return f"{own} = {made}" if isinstance(made, str) else assigned(own, made)


def model_source(path: Path) -> Source:
    """Return the names of a model file and of those that it imports, and what stands for them."""
    files = sources(path)
    names = (Path(os.path.relpath(file, path.parent)).as_posix() for file in files)
    lines = [
        assigned("MODEL_FILES", tuple_of(*map(literal, names)), "that were planned"),
        f"MODEL_DIGEST = {literal(source_digest(files))}  # of their text",
    ]
    return Source("\n".join(lines))
