"""Reads the modules of a model: their classes, attributes and imports."""

from __future__ import annotations

import builtins
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import FunctionType, MappingProxyType, NoneType
from typing import Any

from torch import Tensor, autograd, nn

from autopar.codegen.forward.reading import SizesRead, reads_sizes, sizes_read
from autopar.codegen.forward.reading.author_names import parsed, unpacked
from autopar.codegen.forward.reading.forward_source import (
    branches_in_training,
    checks_sizes,
    keeps_state,
    left_on_others,
    numbers_read,
    own_attributes,
    remembers,
)
from autopar.codegen.text.expressions import is_identifier, string
from autopar.codegen.text.values import KNOWN
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.ops import Value
from autopar.planner.model.functions import (
    forward_hooks,
    nested_code,
    plain_function,
    plain_functions,
)

FIRST_STAGE, MIDDLE_STAGE, LAST_STAGE = "FirstStage", "MiddleStage", "LastStage"
LOSS_STAGE = "LossStage"
_SCRIPT_NAMES = frozenset((*KNOWN, FIRST_STAGE, MIDDLE_STAGE, LAST_STAGE, LOSS_STAGE))


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Imported:
    """A class or function that a script uses: its module, its name there and in the script."""

    module: str
    qualname: str
    name: str  # nn.Linear for PyTorch's modules, which need no import of their own


def is_free(name: str) -> bool:
    """Whether a script may define a name: neither the script nor Python's builtins use it."""
    return name not in _SCRIPT_NAMES and not hasattr(builtins, name)


def imported(kind: Any) -> Imported:
    """Return a class or function as a script imports it under its own name."""
    return Imported(module=kind.__module__, qualname=kind.__qualname__, name=kind.__name__)


def imported_classes(kinds: Iterable[type]) -> Mapping[type, Imported]:
    """Return the names under which a script imports classes.

    They are the classes' own names, after those of the classes around a nested class. If several
    classes have one name, or the script uses it otherwise, the file's name goes before it: `Block`
    in decoder.py becomes `DecoderBlock`.
    """
    distinct = list(dict.fromkeys(kinds))
    counts = Counter(kind.__name__ for kind in distinct)
    taken = set(_SCRIPT_NAMES)
    found: dict[type, Imported] = {}
    for kind in distinct:
        own, name = imported(kind), kind.__name__
        if getattr(nn, name, None) is kind:
            name = f"nn.{name}"
        elif not own.module.startswith("torch."):
            if "." in own.qualname:
                name = "".join(map(_capitalised, own.qualname.split(".")))
            if counts[name] > 1 or name in taken:
                name = f"{_capitalised(own.module.rpartition('.')[2])}{name}"
            while name in taken:
                name += "_"
            taken.add(name)
        found[kind] = Imported(module=own.module, qualname=own.qualname, name=name)
    return found


def _capitalised(text: str) -> str:
    """Return snake_case as CamelCase."""
    return "".join(part[0].upper() + part[1:] for part in re.split(r"\W+|_", text) if part)


class Container(StrEnum):
    """How the children of a module are accessed."""

    ATTRIBUTE = "attribute"
    INDEX = "index"  # ModuleList, Sequential
    KEY = "key"  # ModuleDict


def is_number(value: Value) -> bool:
    """Whether a plain argument is None, a boolean or a number."""
    return value is None or isinstance(value, (bool, int, float, complex))


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A parameter of a forward: its kind as in `inspect`, its annotation and default as text."""

    name: str
    kind: inspect._ParameterKind
    annotation: str
    default: str | None

    def is_default(self, value: Value) -> bool:
        """Whether a value equals the parameter's default."""
        return self.default is not None and is_number(value) and self.default == repr(value)

    @property
    def text(self) -> str:
        """The parameter as in a `def`, without the markers `/` and `*`."""
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(self.kind.name, "")
        declared = f"{stars}{self.name}: {self.annotation}"
        return declared if self.default is None else f"{declared} = {self.default}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the user's model: the facts needed to print code about it."""

    path: str
    first: str  # the first of its paths; it has several if it is registered several times
    home: Imported  # where a script imports its class from
    class_name: str
    arguments: tuple[Argument, ...]
    returns: str
    container: Container
    numbers: tuple[tuple[str, int | float], ...]  # its attributes that are numbers
    settings: Mapping[str, int | float]  # also numbers inside attributes: "config.eps"
    unpacks: Mapping[str, tuple[str, ...]]  # variable of its forward → names it is unpacked into
    trains: bool = True  # as the constructor or build_model leaves it; False: eval mode
    is_importable: bool = True  # False if made at run time, such as torch's parametrized classes
    checks_sizes: bool = False  # its forward raises an error for unexpected sizes
    # its forward may read an attribute before it sets it: an earlier call or another class set it
    keeps_state: bool = False
    # a method sets an attribute outside of the constructor, and a method reads it, in any order
    remembers: bool = False
    branches_in_training: bool = False  # its forward computes something else in evaluation
    # the sizes of tensors that its forward reads: numbers in it may be such sizes
    sizes_read: frozenset[SizesRead] = frozenset()
    # plain and autograd Functions available in its file, and whether each reads sizes of tensors
    functions: Mapping[Imported, bool] = field(default_factory=dict)

    @property
    def is_torch(self) -> bool:
        """Whether the class is PyTorch's own."""
        return self.home.module.startswith("torch.")


Modules = Mapping[str, Module]


def bound(
    module: Module, arguments: Sequence[Value], keywords: Sequence[tuple[str, Value]]
) -> list[tuple[str, Value]]:
    """Return, for each argument of a call, its expression in the forward and its recorded value.

    The expression is a name, or `kwargs["name"]`.
    """
    positional = [
        a
        for a in module.arguments
        if a.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    found = [(a.name, value) for a, value in zip(positional, arguments, strict=False)]
    rest = tuple(arguments[len(positional) :])
    if rest:
        found.append((_star_argument(module, inspect.Parameter.VAR_POSITIONAL).name, rest))
    named = {a.name for a in module.arguments if a.kind is not inspect.Parameter.VAR_KEYWORD}
    for name, value in keywords:
        if name in named:
            found.append((name, value))
        else:
            extra = _star_argument(module, inspect.Parameter.VAR_KEYWORD).name
            found.append((f"{extra}[{string(name)}]", value))
    return found


def _star_argument(module: Module, kind: inspect._ParameterKind) -> Argument:
    for argument in module.arguments:
        if argument.kind is kind:
            return argument
    raise InputError(f"{module.path} is called with arguments that its forward does not take")


@once_per_graph
def named_functions(_: Graph, modules: Modules) -> Mapping[Imported, bool]:
    """Return the functions that the modules' files define or import; see `Module.functions`."""
    groups = {id(module.functions): module.functions for module in modules.values()}
    return {one: reads for group in groups.values() for one, reads in group.items()}


def modules_of(model: nn.Module) -> Modules:
    """Return the facts about every module of a model, by path; the root's path is ""."""
    facts: dict[Hashable, Mapping[str, Any]] = {}
    found: dict[str, Module] = {}
    firsts: dict[int, str] = {}
    kinds = tuple(dict.fromkeys(map(type, model.modules())))  # every run has this order
    homes, sources = imported_classes(kinds), {kind: _source(kind) for kind in kinds}
    read = {kind: numbers_read(source) for kind, source in sources.items()}
    remembering = {kind: remembers(source) for kind, source in sources.items()}
    one_per_file = {id(_names(module)): module for module in model.modules()}.values()
    functions = (one.__code__ for module in one_per_file for one in _plain_functions(module))
    mentioned = {name for one in functions for code in nested_code(one) for name in code.co_names}
    foreign = left_on_others(sources.values(), mentioned)
    for path, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        hooks = tuple(map(plain_function, forward_hooks(module)))
        key = (kind, plain_function(module.forward), hooks)
        if key not in facts:
            facts[key] = _facts(module, others_set=bool(foreign & own_attributes(sources[kind])))
        found[path] = Module(
            path=path,
            first=firsts.setdefault(id(module), path),
            home=homes[kind],
            class_name=kind.__name__,
            container=_container(module),
            numbers=tuple(_numbers(module)),
            settings=MappingProxyType(
                {**dict(_numbers(module)), **dict(_settings(module, read[kind]))}
            ),
            trains=module.training,
            is_importable=_is_importable(kind),
            remembers=remembering[kind],
            **facts[key],
        )
    return found


def _facts(module: nn.Module, *, others_set: bool) -> Mapping[str, Any]:
    """Return facts about a module's hooks and forward (of its class, or set on the module itself).

    With `others_set`, other classes may set attributes that the module's class reads.
    """
    source = _source(inspect.unwrap(module.forward), of=type(module))
    hooks = [plain_function(hook) for hook in forward_hooks(module)]
    sources = [source, *map(_source, hooks)]
    arguments, returns = _signature(module)
    return {
        "arguments": arguments,
        "returns": returns,
        "branches_in_training": any(map(branches_in_training, sources)),
        "checks_sizes": any(map(checks_sizes, sources)),
        "keeps_state": others_set or any(map(keeps_state, sources)),
        "sizes_read": _sizes_read(module, hooks, source),
        "functions": dict(_functions(module)),
        "unpacks": unpacked(parsed(source)),
    }


def _sizes_read(
    module: nn.Module, hooks: Sequence[Callable[..., Any]], source: str
) -> frozenset[SizesRead]:
    if not hooks:
        return frozenset(sizes_read(module.forward, type(module), source))
    # a hook may change the arguments before the forward reads their sizes
    is_read = any(reads_sizes(one, type(module)) for one in (module.forward, *hooks))
    return frozenset({SizesRead()} if is_read else ())


def _is_importable(kind: type) -> bool:
    """Whether a script can import a class by its name.

    True for a class that is defined inside a function: it is refused later, with its own message.
    """
    holder: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        if name == "<locals>":
            return True
        holder = getattr(holder, name, None)
    return holder is kind


def _source(thing: Callable[..., Any], *, of: type | None = None) -> str:
    """Return the source of a class, forward or hook, or "" if there is none or it is PyTorch's."""
    if (of or thing).__module__.startswith("torch."):
        return ""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # made by exec, or in C
        return ""


def _functions(module: nn.Module) -> Iterator[tuple[Imported, bool]]:
    """Yield the functions that a forward's file names, except torch's; see `Module.functions`."""
    yield from ((imported(one), reads_sizes(one, object)) for one in _plain_functions(module))
    for value in _names(module).values():
        is_function = isinstance(value, type) and issubclass(value, autograd.Function)
        if is_function and not value.__module__.startswith("torch.") and _is_importable(value):
            yield imported(value), False


def _plain_functions(module: nn.Module) -> list[FunctionType]:
    return [function for _, function in plain_functions(_names(module))]


def _names(module: nn.Module) -> Mapping[str, Any]:
    """Return the global names of a forward's file."""
    found: Mapping[str, Any] = getattr(inspect.unwrap(module.forward), "__globals__", {})
    return found


def _signature(module: nn.Module) -> tuple[tuple[Argument, ...], str]:
    signature = inspect.signature(module.forward)
    arguments = tuple(
        Argument(
            name=parameter.name,
            kind=parameter.kind,
            annotation=_annotation(parameter.annotation),
            default=_default(parameter.default),
        )
        for parameter in signature.parameters.values()
    )
    return arguments, _annotation(signature.return_annotation)


_PLAIN = {
    "Tensor": "Tensor", "torch.Tensor": "Tensor", "int": "int", "float": "float", "bool": "bool",
    "str": "str", "None": "None",
}  # fmt: skip


def _annotation(annotation: Any) -> str:
    """Return an annotation as text, or Any if it contains types that a script does not import."""
    if annotation is Tensor:
        return "Tensor"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.strip().strip("'\"")
    if text.startswith(("tuple[", "Tuple[")) and text.endswith("]"):
        parts = [_plain_union(part) for part in text[6:-1].split(",")]
        return "Any" if "Any" in parts else f"tuple[{', '.join(parts)}]"
    if text.startswith(("Optional[", "typing.Optional[")) and text.endswith("]"):
        text = f"{text[text.index('[') + 1 : -1]} | None"
    return _plain_union(text)


def _plain_union(text: str) -> str:
    parts = [_PLAIN.get(part.strip(), "Any") for part in text.split("|")]
    return "Any" if "Any" in parts else " | ".join(parts)


def _default(value: Any) -> str | None:
    """Return a default as text; one of a subclass, such as an IntEnum, as its plain value."""
    if value is inspect.Parameter.empty:
        return None
    if isinstance(value, str):
        text = ascii(str.__str__(value))  # a StrEnum's own __str__ may give its name
        return text if "'" in text[1:-1] or '"' in text else text.replace("'", '"')
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f'float("{float(value)}")'
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    return repr(value) if isinstance(value, (bool, NoneType)) else "..."


def _container(module: nn.Module) -> Container:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return Container.INDEX
    return Container.KEY if isinstance(module, nn.ModuleDict) else Container.ATTRIBUTE


def _numbers(module: nn.Module) -> list[tuple[str, int | float]]:
    return [
        (name, value)
        for name, value in vars(module).items()
        if type(value) in (int, float) and is_identifier(name) and not name.startswith("_")
    ]


def _settings(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers that these names have, such as "config.eps", unless inside a module."""
    for name in sorted(names):
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
            if isinstance(found, (nn.Module, Tensor)):
                break
        if type(found) in (int, float):
            yield name, found
