"""Finds the calls that read what other code has left behind: on a module, or in what both know.

Printed code leaves nothing anywhere, and neither does another stage: what reads there must be
printed as well, where each tensor and each number is at hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.codegen.forward.opening.opening import Opening
from autopar.codegen.forward.reading.calls import LOSS, CallTree, common
from autopar.planner.ops import Left


def finds_state(opening: Opening) -> list[str]:
    """Return the calls to open, as nobody may leave behind any longer what they look for."""
    tree, modules, open_calls = opening.tree, opening.split.modules, opening.printed
    calls = tree.graph.calls
    found: dict[str, None] = {}
    for call, chain in tree.chains.items():
        if _is_printed(tree.hidden(call), opening) or _finds_left(call, opening):
            found[call] = None
        if len(chain) < 3:
            continue
        module, untold = modules.get(calls[call].path), tree.untold(call)
        keeps_state = module is not None and module.keeps_state
        if ((keeps_state or untold) and chain[-2] in open_calls) or _is_printed(untold, opening):
            found[call] = None
    for same in _repeated(tree):
        module, shared = modules.get(calls[same[0]].path), common([tree.chains[c] for c in same])
        if module is not None and module.remembers and shared[-1] in open_calls:
            found |= dict.fromkeys(c for call in same for c in tree.chains[call][len(shared) :])
    return [call for call in found if call not in open_calls and not _is_function(call, tree)]


def _is_function(call: str, tree: CallTree) -> bool:
    return call != LOSS and tree.graph.calls[call].is_function


def _finds_left(call: str, opening: Opening) -> bool:
    """Whether the code of a call may look for what a call inside it has left, or takes it away."""
    calls, tree, printed = opening.tree.graph.calls, opening.tree, opening.printed
    if call != LOSS and calls[call].left is Left.FOR_A_WHILE:
        return not printed.isdisjoint(tree.chains[call][:-1])
    leaving = (one for one in printed if one != LOSS and calls[one].left is not Left.NOTHING)
    return any(call in tree.chains[one][:-1] for one in leaving)


def _is_printed(names: frozenset[str], opening: Opening) -> bool:
    """Whether printed code makes one of these tensors."""
    made_by = opening.tree.graph.index.made_by
    return not all(opening.is_hidden(made_by[name]) for name in names if name in made_by)


def _repeated(tree: CallTree) -> list[Sequence[str]]:
    """Return the calls of each module that is called several times."""
    found = defaultdict[str, list[str]](list)
    for call, record in tree.graph.calls.items():
        found[record.path].append(call)
    return [same for same in found.values() if len(same) > 1]
