"""Distinguishes caches from state, by a second step on the Python state that the first one left.

A step is traced twice. The second trace finds what the first one changed in the Python state (see
model/outside.py). Numbers stay as they are. A tensor computed from the batch or weights is replaced
by a stand-in, which the second trace must not read. A tensor made of constants alone is a cache: it
is replaced by its old value, and the second trace may fill it again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from autopar.planner.model.outside import ABSENT, Holder, StateSnapshot, StateValue


@dataclass(slots=True)
class LeftBehind:
    """A step's changes of Python state; some tensors in them are replaced by stand-ins."""

    changed: list[tuple[Holder, Mapping[Any, Any]]] = field(default_factory=list)
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)  # the stand-ins, by id
    read: bool = False  # whether the next step reads a stand-in, or a cache is stale

    def put(self) -> None:
        """Put the changes in place for the next step."""
        for holder, changed in self.changed:
            holder.put(changed)

    def note_read(self, given: Any) -> None:
        """Record whether a function gets a tensor that an earlier step left."""
        if self.replaced and not self.read:
            self.read = any(id(one) in self.replaced for one in pytree.tree_leaves(given))


def left_by_call(before: StateSnapshot, after: StateSnapshot) -> tuple[StateValue, ...]:
    """Return what a call changed: values compared by content, and tensors computed in the step."""
    changed = [after.leaves[place] for place in before.changes_to(after)]
    tensors = [one for one in changed if isinstance(one.tensor, FakeTensor)]
    made = [one for one in tensors if _is_made_of_step(one.tensor)]
    return (*(one for one in changed if one.is_content), *made)


def left_behind(before: StateSnapshot, after: StateSnapshot) -> LeftBehind:
    """Return a step's changes between two snapshots; call it while the trace is running."""
    left = LeftBehind()
    for key, holder in before.holders.items():
        later = after.holders.get(key)
        if later is not None and later.owner is holder.owner:
            changed = _changed(holder.values, later.values, left.replaced)
            if changed:
                left.changed.append((holder, changed))
    left.read = any(map(_is_stale, after.caches))
    return left


def _is_stale(function: Any) -> bool:
    """Whether a function has cached a tensor that the next step must compute again.

    A cache whose keys are tensors is not stale: the next step has other tensors.
    """
    held = gc.get_referents(function)
    tables = [one for one in held if isinstance(one, dict)]
    given = pytree.tree_leaves([list(table) for table in tables])
    if any(isinstance(one, torch.Tensor) for one in given):
        return False
    made = pytree.tree_leaves([list(table.values()) for table in tables])
    fakes = (one for one in (*held, *made) if isinstance(one, FakeTensor))
    return any(map(_is_made_of_step, fakes))


def _changed(
    before: Mapping[Any, Any], after: Mapping[Any, Any], replaced: dict[int, torch.Tensor]
) -> Mapping[Any, Any]:
    """Return the changed values of a holder, as the next step is to find them."""
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in (*before, *after)}
    return {
        key: _as_found_later(value, old, replaced)
        for key, (old, value) in pairs.items()
        if value is not old
    }


def _as_found_later(value: Any, old: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """Return what the next step is to find for a changed value.

    This is the value itself if it has no traced tensors. If these are made of constants alone, it
    is the old value; otherwise the value with stand-ins for them.
    """
    fakes = [one for one in pytree.tree_leaves(value) if isinstance(one, FakeTensor)]
    if not fakes:
        return value
    if not any(map(_is_made_of_step, fakes)):
        return old
    kept = pytree.tree_map_only(FakeTensor, _real, value)
    replaced |= {id(one): one for one in pytree.tree_leaves(kept) if isinstance(one, torch.Tensor)}
    return kept


def _real(fake: FakeTensor) -> torch.Tensor:
    """Return zeros with the sizes and dtype of a traced tensor."""
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in fake.shape]
    return torch.zeros(sizes, dtype=fake.dtype, device=fake.device)


def _is_made_of_step(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor depends on batch or weights, is random, or is of no known origin."""
    mode = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return slot is None or any(map(_is_of_step, _ancestors(slot.proxy.node)))


def _is_of_step(node: fx.Node) -> bool:
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "placeholder" or is_drawn


def _ancestors(node: fx.Node) -> Iterable[fx.Node]:
    met, waiting = {node}, [node]
    while waiting:
        for one in waiting.pop().all_input_nodes:
            if one not in met:
                met.add(one)
                waiting.append(one)
    return met
