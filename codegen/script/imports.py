"""Turns the names that a script uses into its import statements."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from autopar.codegen.forward.text.imports import from_line, imports_of
from autopar.codegen.known_names import KNOWN
from autopar.codegen.python_text import Source

_SECTIONS = ("__future__", "standard", "others", "autopar")


def script_imports(body: str, known: Mapping[str, str] = KNOWN) -> Source:
    """Return the imports of a script in isort's order, from the names that its body uses."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    lines = {"from __future__ import annotations", *imports_of([body])}
    lines |= {known[name] for name in used & set(known)}
    return sorted_imports(lines)


def sorted_imports(lines: Iterable[str]) -> Source:
    """Return import lines in isort's order, those from one module together."""
    plain: dict[str, set[str]] = defaultdict(set)
    members: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        words = line.split()
        if words[0] == "import":
            plain[_section(words[1])].add(line)
        else:
            names = " ".join(words[3:]).strip("()").split(",")  # long lines are in brackets
            members[_section(words[1])][words[1]].update(n.strip() for n in names if n.strip())
    blocks = [
        "\n".join([*sorted(plain[section]), *_from_lines(members[section])])
        for section in _SECTIONS
    ]
    return Source("\n\n".join(block for block in blocks if block))


def _from_lines(members: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the lines of each module; what takes another name has one of its own."""
    for module in sorted(members):
        every = sorted(members[module], key=_member_order)
        plain = [name for name in every if " as " not in name]
        for name in every:
            if " as " in name:
                yield f"from {module} import {name}"
            elif name == plain[0]:
                yield from_line(module, plain)


def _member_order(name: str) -> tuple[int, str]:
    """Constants first, then classes, then the rest, as isort has it."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


def _section(module: str) -> str:
    top = module.partition(".")[0]
    if top in ("__future__", "autopar"):
        return top
    return "standard" if top in sys.stdlib_module_names else "others"
