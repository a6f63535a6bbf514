"""Turns `model.py[:factory]` and `--arg key=value` into checked functions of the model."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import EnumType
from functools import wraps
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from autopar.planner.errors import InputError
from autopar.planner.files import check_given
from autopar.planner.model.guard import (
    CONTRACT,
    ImportName,
    guarded,
    import_name,
    instead_of,
    nearest_file,
    no_process_group,
    refuse_no_python,
    uncompiled,
)

# parameters that autopar itself passes, not --arg
_PASSED = frozenset({"batch_size", "outputs", "batch", "params", "optimizer"})
_ENUM = "enum "  # before the name of an enum, among annotations
# By the annotation without brackets. Exact types: True is an int for Python, but not for a person.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,),
    "list": (list, tuple), "tuple": (tuple, list), "dict": (dict,), "set": (set,),
}  # fmt: skip


def parse_arguments(
    arguments: Sequence[str], functions: Mapping[str, Callable[..., Any]], path: Path
) -> dict[str, Any]:
    """Parse `key=value` by the annotation of the parameter that takes it."""
    known = _known_parameters(functions)
    values: dict[str, Any] = {}
    for text in arguments:
        key, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise InputError(f"--arg {text} is not of the form key=value", fix="--arg size=tiny")
        if key in values:
            raise InputError(f"--arg {key} is given twice")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            fix = f"did you mean {near[0]}?" if near else ""
            takes = ", ".join(sorted(known)) or "no arguments"
            raise InputError(
                f"--arg {key}: no function of {path.name} takes it",
                expected=f"known: {takes}",
                fix=fix,
            )
        values[key] = _parse_value(key, raw, known[key])
    return values


def _known_parameters(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Return the keyword parameters that --arg may set, with their annotations as text."""
    known: dict[str, str] = {}
    for function in functions.values():
        for name, parameter in inspect.signature(function).parameters.items():
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and name not in _PASSED:
                enum = _enum_of(parameter.annotation, function)
                text = inspect.formatannotation(parameter.annotation).strip("'\"")
                known.setdefault(name, text if enum is None else f"{_ENUM}{enum.__name__}")
    return known


def _enum_of(annotation: object, function: Callable[..., Any]) -> EnumType | None:
    """Return the enum that a parameter is annotated with, by itself or by its name."""
    if isinstance(annotation, str):
        annotation = getattr(inspect.unwrap(function), "__globals__", {}).get(annotation)
    return annotation if isinstance(annotation, EnumType) else None


def _parse_value(key: str, raw: str, annotation: str) -> Any:
    kinds = annotation.removeprefix("Optional[").removesuffix("]").split(" | ")
    if raw.lower() == "none" and ("None" in kinds or "Optional[" in annotation):
        return None
    if kinds[0] in ("str", "Path"):
        return raw
    if annotation.startswith(_ENUM):
        name = annotation.removeprefix(_ENUM)
        raise InputError(
            f"--arg {key}: the function takes an enum ({name}), which --arg cannot make",
            expected="a str, a number, or another Python literal",
            fix=f"let it take a str, and call {name}({key}) itself",
        )
    words = {"true": True, "false": False, "none": None}
    try:
        value = words[raw.lower()] if raw.lower() in words else ast.literal_eval(raw)
    except (ValueError, SyntaxError):
        value = raw
    kind, _, inner = kinds[0].removeprefix("typing.").partition("[")
    if kind == "Literal":
        return _chosen(key, raw, value, inner.removesuffix("]"))
    kind = kind.lower()
    if kind in _TYPES and type(value) not in _TYPES[kind]:
        fix = f"write a Python literal in quotes: --arg '{key}=…'" if inner else ""
        raise InputError(f"--arg {key}={raw} is not of type {annotation}", fix=fix)
    return _TYPES[kind][0](value) if kind in ("list", "tuple") else value


def _chosen(key: str, raw: str, value: object, inner: str) -> object:
    """Return the one of a Literal's values that --arg names."""
    try:
        choices = ast.literal_eval(f"({inner},)")
    except (ValueError, SyntaxError):  # members of an enum
        return value
    for choice in choices:
        if choice == raw or (type(choice), choice) == (type(value), value):
            return choice
    expected = f"one of {', '.join(map(str, choices))}"
    raise InputError(f"--arg {key}={raw} is none of its values", expected=expected)


def import_file(path: Path) -> ModuleType:
    """Import a file, even if it was imported before, unless it is unchanged and defines torch ops.

    As in `python FILE`, its folder comes first on sys.path; for a file in a package, this is the
    folder that holds the package.
    """
    known = import_name(path)
    _check_name(path, known)
    text = path.read_bytes()
    before = _WITH_OPS.get(path)
    if before is not None and before.text == text:
        sys.modules[known.name] = before.module
        return before.module
    spec = importlib.util.spec_from_file_location(known.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(known.folder) not in sys.path:
        sys.path.insert(0, str(known.folder))
    _forget_packages_elsewhere(known)
    shadowed = sys.modules.get(known.name)
    ops = _defined_ops()
    try:
        with guarded(f"importing {path.name}", path), no_process_group(path), uncompiled():
            if package := known.name.rpartition(".")[0]:
                importlib.import_module(package)
            sys.modules[known.name] = module  # dataclasses and pickling look modules up here
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(known.name, None)
        if shadowed is not None:
            sys.modules[known.name] = shadowed
        raise
    if _defined_ops() - ops or before is not None:
        _WITH_OPS[path] = ImportedFile(text=text, module=module)
    return module


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """The text of a file when it was imported, and the module made of it."""

    text: bytes
    module: ModuleType


# Files that define ops. They are not imported again: to define an op again, torch frees the first
# one, and graphs that were traced with it would crash the process.
_WITH_OPS: dict[Path, ImportedFile] = {}


def _defined_ops() -> frozenset[str]:
    library = sys.modules.get("torch.library")
    return frozenset(getattr(library, "_defs", ()))


def _forget_packages_elsewhere(known: ImportName) -> None:
    """Remove a package of the same name, imported from another folder, from sys.modules."""
    top, dot, _ = known.name.partition(".")
    there = getattr(sys.modules.get(top), "__file__", None)
    if dot and there and Path(there).parent != known.home:
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]


def _check_name(path: Path, known: ImportName) -> None:
    """Raise if a file's name would hide a module of Python or an installed one."""
    top, dot, _ = known.name.partition(".")
    there = getattr(sys.modules.get(top), "__file__", None) or ""
    if top in sys.stdlib_module_names or "site-packages" in there:
        found = known.home if dot else path
        raise InputError(
            f"{found.name} would hide the module {top}, which other modules import",
            where=str(found),
            fix=f"rename it, such as my_{found.name}",
        )


REQUIRED = ("example_batch",)
OPTIONAL = (
    "loss",
    "build_dataset",
    "build_eval_dataset",
    "build_collate",
    "build_optimizer",
    "build_scheduler",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A loaded model file: its functions, with the values of --arg bound to their parameters."""

    path: Path
    factory: str
    arguments: tuple[tuple[str, Any], ...]
    build_model: Callable[[], Any]
    example_batch: Callable[[int], Any]
    loss: Callable[..., Any] | None
    build_dataset: Callable[[], Any] | None
    build_optimizer: Callable[..., Any] | None
    build_scheduler: Callable[..., Any] | None
    build_collate: Callable[[], Any] | None = None
    build_eval_dataset: Callable[[], Any] | None = None
    metrics: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """The model's name for people: the file and its arguments."""
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments)
        return f"{self.path.stem} ({arguments})" if arguments else self.path.stem

    def plain_entries(self) -> dict[str, Any]:
        """Return the batch's entries that are not tensors; they are the same for every batch."""
        from torch import Tensor  # imported here, because it takes seconds

        batch = self.example_batch(1)
        return {key: value for key, value in batch.items() if not isinstance(value, Tensor)}


def load_model_file(spec: str, arguments: Sequence[str] = ()) -> ModelFile:
    """Load MODEL as given on the command line, with its `key=value` arguments."""
    path, factory = split_spec(spec)
    module = import_file(path)
    # without an evaluation dataset, a function of such a common name is not meant for autopar
    evaluating = ("metrics",) if hasattr(module, "build_eval_dataset") else ()
    names = (factory, *REQUIRED, *OPTIONAL, *evaluating)
    functions = {name: getattr(module, name, None) for name in names}
    for name in (factory, *REQUIRED):
        _check_function(functions[name], name, path=path, module=module)
    _check_optional(module, path)
    present = {name: f for name, f in functions.items() if callable(f)}
    values = parse_arguments(arguments, present, path)
    bound = {name: _bind(f, values, name=name, path=path) for name, f in present.items()}
    return ModelFile(
        path=path,
        factory=factory,
        arguments=tuple(values.items()),
        build_model=bound[factory],
        example_batch=bound["example_batch"],
        metrics=bound.get("metrics"),
        **{name: bound.get(name) for name in OPTIONAL},
    )


def model_path(spec: str) -> Path:
    """Return the file that MODEL names on the command line."""
    return split_spec(spec)[0]


def split_spec(spec: str) -> tuple[Path, str]:
    """Return file and factory of `path.py:factory`; the factory is `build_model` unless named."""
    name, _, factory = spec.rpartition(":")
    if not name or "/" in factory or factory.endswith(".py"):
        name, factory = spec, "build_model"
    path = Path(name)
    if name and path.is_dir():
        files = sorted(path.glob("*.py"), key=lambda file: (file.name.startswith("_"), file))
        hint = next(iter(files), path / "model.py")
        raise InputError(f"{name} is a folder", expected="a model file", fix=f"name it: {hint}")
    if name and (path.exists() or path.is_symlink()):
        check_given(path, what="the model file")
    if not path.is_file():
        raise InputError(f"there is no file {name}", expected=CONTRACT, fix=nearest_file(path))
    if path.suffix != ".py":
        refuse_no_python(path, CONTRACT)
    return path.resolve(), factory or "build_model"


def _check_function(function: object, name: str, *, path: Path, module: ModuleType) -> None:
    if function is None:
        raise InputError(
            f"there is no function {name}",
            where=str(path),
            expected=CONTRACT,
            fix=instead_of(name, path, module),
        )
    if not callable(function):
        found = f"{name} is a {type(function).__name__}, not a function"
        raise InputError(found, where=str(path), expected=CONTRACT)
    if isinstance(getattr(function, "forward", None), MethodType):
        found = f"{name} is a model, a {type(function).__name__}, not a function that makes one"
        raise InputError(found, where=str(path), expected=CONTRACT, fix=f"def {name}(): return …")


def _check_optional(module: ModuleType, path: Path) -> None:
    """Raise for functions that would be ignored: a misspelt name, a collate without a dataset."""
    for name, use in _OF_ROWS.items():
        if hasattr(module, name) and getattr(module, "build_dataset", None) is None:
            raise InputError(
                f"there is a {name}, and no build_dataset {use}",
                where=str(path),
                fix=f"define build_dataset(), which returns the rows; or leave {name} out",
            )
    for name in OPTIONAL:
        near = get_close_matches(name, vars(module), n=1, cutoff=0.9)
        if near and near[0] != name and name not in vars(module):
            raise InputError(
                f"autopar knows no function {near[0]}, and would not call it",
                where=str(path),
                fix=f"did you mean {name}? Otherwise rename it: the names are too similar",
            )


_OF_ROWS = {
    "build_collate": "whose rows it would make batches of",
    "build_eval_dataset": "whose rows the model would be trained on",
}


def _bind(
    function: Callable[..., Any], values: Mapping[str, Any], *, name: str, path: Path
) -> Callable[..., Any]:
    """Return a function with its arguments bound; its errors are reported as autopar's."""
    parameters = inspect.signature(function).parameters
    share = {key: value for key, value in values.items() if key in parameters}
    _check_call(function, share, name=name, path=path)

    @wraps(function)
    def call(*positional: Any) -> Any:
        with guarded(f"calling {name}", path, positional), no_process_group(path):
            return function(*positional, **share)

    return call


def _check_call(
    function: Callable[..., Any], share: Mapping[str, Any], *, name: str, path: Path
) -> None:
    """Raise if autopar and --arg do not pass exactly the parameters that a function needs."""
    called = _CALLED.get(name, f"{name}()")
    passed = called.count(",") + 1 if name in _CALLED else 0
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * passed, **share)
    except TypeError as error:
        fix = f"let {name} take these arguments"
        if "missing" in str(error):
            missing = str(error).rpartition("'")[0].rpartition("'")[2]
            fix = f"give it by --arg {missing}=VALUE, or give the parameter a default"
        elif "multiple values" in str(error):
            fix = "--arg sets the parameters of this name in all functions: rename this one"
        raise InputError(
            f"{name}: {error}",
            where=f"{name}{signature} in {path}",
            expected=f"it is called as {called}",
            fix=fix,
        ) from None


_CALLED = {
    "example_batch": "example_batch(batch_size)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
    "build_optimizer": "build_optimizer(params)",
    "build_scheduler": "build_scheduler(optimizer)",
}
