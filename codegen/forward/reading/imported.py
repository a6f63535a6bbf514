"""Gives each class of a model the name by which a script can import it beside its own."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.codegen.forward.text.imports import IMPORTED
from autopar.codegen.known_names import KNOWN

FIRST_STAGE, MIDDLE_STAGE, LAST_STAGE = "FirstStage", "MiddleStage", "LastStage"
LOSS_STAGE = "LossStage"
_OF_SCRIPTS = frozenset((*KNOWN, *IMPORTED, FIRST_STAGE, MIDDLE_STAGE, LAST_STAGE, LOSS_STAGE))


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Imported:
    """A class as a script has it: the module and the name there, and the name in the script."""

    module: str
    qualname: str
    name: str


def is_free(name: str) -> bool:
    """Whether a script has no other use for a name."""
    return name not in _OF_SCRIPTS and not hasattr(builtins, name)


def imported(kind: Any) -> Imported:
    """Return a class under its own name."""
    return Imported(module=kind.__module__, qualname=kind.__qualname__, name=kind.__name__)


def imported_classes(kinds: Iterable[type]) -> Mapping[type, Imported]:
    """Return classes under their own names, but for some of the user's.

    A class in a class has the names of both, one whose name another class or the script has that of
    its file before its own: `Block` in decoder.py is `DecoderBlock` then.
    """
    distinct = list(dict.fromkeys(kinds))
    counts = Counter(kind.__name__ for kind in distinct)
    taken = set(_OF_SCRIPTS)
    found: dict[type, Imported] = {}
    for kind in distinct:
        own, name = imported(kind), kind.__name__
        if not own.module.startswith("torch."):
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
