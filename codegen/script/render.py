"""Renders a script from its view, checks its text, adds its checksum, and writes it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, PackageLoader, StrictUndefined

from autopar.codegen.script import ScriptView
from autopar.codegen.text.lines import from_line
from autopar.codegen.text.values import (
    KNOWN,
    Source,
    identifier,
    literal,
    remark,
)
from autopar.planner.errors import InputError
from autopar.planner.files import check_writable, read_given, write_whole
from autopar.planner.plan.plan import Plan, StoredPlan

FILE_NAME = "train.py"


def source(value: object) -> Source:
    """Return text that this package made; raise for any other value."""
    if not isinstance(value, Source):
        raise TypeError(f"{value!r} is no source text of ours")
    return value


FILTERS: Mapping[str, Callable[..., Source]] = MappingProxyType(
    {"literal": literal, "identifier": identifier, "remark": remark, "source": source}
)


@cache  # a template is compiled once
def environment() -> Environment:
    """Return the environment of the scripts' templates."""
    return templates_of("autopar.codegen.script", FILTERS)


def templates_of(package: str, filters: Mapping[str, Callable[..., Source]]) -> Environment:
    """Return the environment of a package's templates; values without a filter raise."""
    made = Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        finalize=source,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters = dict(filters)
    return made


_SECTIONS = ("standard", "others", "autopar")


def script_imports(body: str, known: Mapping[str, str] = KNOWN) -> Source:
    """Return the imports of a script in isort's order, from the names that its body uses."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    return sorted_imports(known[name] for name in used & known.keys())


def sorted_imports(lines: Iterable[str]) -> Source:
    """Return imports of one name each in isort's order, merged by module."""
    plain: dict[str, set[str]] = defaultdict(set)
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        words = line.split()
        if words[0] == "import":
            plain[_section(words[1])].add(line)
        else:
            members[_section(words[1])][words[1]].add(" ".join(words[3:]))
    blocks = [
        "\n".join([*sorted(plain[section]), *_from_lines(members[section])])
        for section in _SECTIONS
    ]
    return Source("\n\n".join(block for block in blocks if block))


def _from_lines(members: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the import lines of each module; renamed imports have their own lines."""
    for module in sorted(members):
        every = sorted(members[module], key=_member_order)
        plain = [name for name in every if " as " not in name]
        for name in every:
            if " as " in name:
                yield f"from {module} import {name}"
            elif name == plain[0]:
                yield from_line(module, plain)


def _member_order(name: str) -> tuple[int, str]:
    """Return isort's sort key: constants first, then classes, then others."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


def _section(module: str) -> str:
    top = module.partition(".")[0]
    if top == "autopar":
        return top
    return "standard" if top in sys.stdlib_module_names else "others"


_TOP = (
    ast.Import,
    ast.ImportFrom,
    ast.ClassDef,
    ast.FunctionDef,
    ast.Assign,
    ast.AnnAssign,
)
_DUNDERS = frozenset({"__file__", "__name__"})
_BUILTINS = frozenset(
    {
        "ValueError", "bool", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "len",
        "list", "max", "min", "print", "property", "range", "reversed", "round", "set", "slice",
        "sorted", "str", "sum", "super", "tuple", "type", "zip",
    }
)  # fmt: skip
BUILTINS_ALONE = _BUILTINS | {"bytes", "getattr", "hasattr", "iter", "map", "next"}


class UnsafeScriptError(AssertionError):
    """A script contains code that training does not need: a bug of autopar, or a forged plan."""


def check_script(script: str) -> None:
    """Raise if a script is not valid Python, or does something that training does not need."""
    check_names(script, KNOWN, _BUILTINS)


def check_names(script: str, modules: Container[str], builtins: Iterable[str]) -> None:
    """Raise if a script has code other than definitions and data, or unknown names.

    `modules` are those that it may import, `builtins` the built-in names that it may use.
    """
    tree = ast.parse(script)
    faults = [*_strange_statements(tree), *_strange_names(tree, modules, builtins)]
    if faults:
        raise UnsafeScriptError("the script would not be safe: " + "; ".join(faults))


def _strange_statements(tree: ast.Module) -> Iterator[str]:
    """Yield top-level statements that are neither definitions nor data."""
    for number, node in enumerate(tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr)
        if not (isinstance(node, _TOP) or is_docstring or ast.unparse(node) in _OF_A_SCRIPT):
            text = ast.unparse(node)
            if not text.startswith("sys.path.insert(0, str(Path(__file__).resolve().parent"):
                yield f"line {node.lineno}: {text[:60]!r}"


_OF_A_SCRIPT = tuple(
    f"if __name__ == '__main__':\n    {called}()" for called in ("tell_errors_once", "main")
)


def _strange_names(
    tree: ast.Module, modules: Container[str], builtins: Iterable[str]
) -> Iterator[str]:
    """Yield undefined names, and names that start with two underscores."""
    defined = {*_defined(tree), *builtins, *_DUNDERS}
    # only the call that reads options may use globals()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    readings = [call for call in calls if ast.unparse(call) == "read_options(argv, globals())"]
    allowed = {id(one) for call in readings for one in ast.walk(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in defined and id(node) not in allowed:
            yield f"line {node.lineno}: the name {node.id}"
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("__")
            and ast.unparse(node) != "super().__init__"
        ):
            yield f"line {node.lineno}: the attribute {node.attr}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in modules and alias.asname not in ("model_file", "F"):
                    yield f"line {node.lineno}: import {alias.name}"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


# The alternatives also match the lines of earlier versions.
_LINE = re.compile(
    r"^# Written by autopar (\S+)(?:, [^\n]*:| \(checksum) ([0-9a-f]{16})"
    r"(?:, plan ([0-9a-f]{16}))?(?:\.|\); edits are kept\.|\)\.\n# Once you edit [^\n]*)$",
    re.MULTILINE,
)


def with_checksum(script: str, plan: Plan) -> Source:
    """Return a script with its checksum after its docstring, in two lines of comments."""
    head, mark, body = script.partition('\n"""\n')
    own = f"checksum {_digest(script)}, plan {plan_digest(plan)}"
    line = remark(f"Written by autopar {plan.autopar} ({own}).")
    kept = remark("Once you edit this file, autopar overwrites it only with --force.")
    return Source(f"{head}{mark}{line}\n{kept}\n{body}")


def is_unchanged(script: str) -> bool:
    """Whether a text is an unchanged script of autopar."""
    found = _LINE.search(script)
    if found is None:
        return False
    without = script[: found.start()] + script[found.end() + 1 :]
    return _digest(without) == found[2]


def is_of_another_plan(script: str, plan: StoredPlan) -> bool:
    """Whether a script, changed or not, was written for another plan.

    False if another version of autopar wrote it: its digest of the same plan may differ.
    """
    found = _LINE.search(script)
    if found is None or found[3] is None or found[1] != plan.autopar:
        return False
    return found[3] != plan_digest(plan)


def plan_digest(plan: StoredPlan) -> str:
    """Return a digest of everything in a plan that determines the script's training."""
    decided = (
        plan.model.source_hash,
        plan.model.arguments,
        replace(plan.arrangement, order=0),  # not stored in files
        plan.stages,
        plan.layouts,
        plan.parameters,
        plan.crossing,
    )
    return _digest(json.dumps(decided, sort_keys=True, default=asdict))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TEMPLATE = "train.py.j2"


def render(view: ScriptView) -> Source:
    """Return the text of a script, with the imports it uses."""
    template = environment().get_template(TEMPLATE)
    parts = {one.name: getattr(view, one.name) for one in fields(view)}
    body = template.render(**parts, imports=Source())
    return Source(template.render(**parts, imports=script_imports(body)))


def refuse_overwriting(
    path: Path, *, fix: str = "choose another name with -o, or overwrite it with --force"
) -> None:
    """Raise if a file would be overwritten that is not an unchanged script of autopar."""
    check_writable(path)
    if not path.exists():
        return
    try:
        is_ours = is_unchanged(read_given(path, what="the script"))
    except InputError:
        is_ours = False
    if not is_ours:
        raise InputError(
            "a file that autopar did not write, or that was changed since, is in the way",
            where=str(path),
            fix=fix,
        )


def write_text(text: str, folder: Path, *, force: bool = False) -> Path:
    """Write a script's text into a folder as train.py, and return its path."""
    path = folder / FILE_NAME
    if not force:
        refuse_overwriting(path)
    write_whole(path, text, what="the script")
    return path
