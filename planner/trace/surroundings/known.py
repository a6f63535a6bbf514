"""Answers a model that decides by numbers which the batch and the weights have no part in.

`(positions.diff() != 1).any()` of positions that an arange made, or `mask.all()` of ones: what was
recorded so far computes it, for several numbers of rows, which must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import networkx as nx
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.planner.trace.nodes import is_getitem, storages_of, writers_of

_ROWS = (2, 7, 64)
_MOST_ELEMENTS = 2**26  # of a tensor on the way
_SYMBOLIC = (SymInt, SymFloat, SymBool)


def known_number(asked: Tensor) -> Any:
    """Return the one number that a traced tensor holds whatever the batch, None if unknown."""
    mode: Any = proxy_tensor.get_proxy_mode()
    if mode is None or asked.numel() != 1:
        return None
    recorded: Any = proxy_tensor.get_proxy_slot(asked, mode.tracer, None)
    nodes = _known(recorded.proxy.node) if recorded is not None else ()
    if not nodes:
        return None
    with _disable_current_modes():
        found = {_computed(nodes, rows, mode.tracer.root) for rows in _ROWS}
    return found.pop() if len(found) == 1 else None


def _known(last: fx.Node) -> Sequence[fx.Node]:
    """Return the nodes that a value is computed by, in order; none where one is not known.

    Those that write to the memory of another among them are among them.
    """
    flow, writers = nx.DiGraph(), writers_of(last.graph)
    flow.add_node(last)
    for node in last.graph.nodes:
        if not _is_number(node):
            written = storages_of([node]) & writers.keys() if writers else ()
            before = chain(node.all_input_nodes, *(writers[one] for one in written))
            flow.add_edges_from((one, node) for one in before)
    needed = {last, *nx.ancestors(flow, last)}
    is_known = all(_is_number(one) or _is_steady(one) for one in needed)
    return [node for node in last.graph.nodes if node in needed] if is_known else ()


def _is_steady(node: fx.Node) -> bool:
    """Whether a node gives the same for the same at every step, and not too much."""
    values = [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    if any(_at(one.numel(), _ROWS[-1]) > _MOST_ELEMENTS for one in values):
        return False
    if node.op == "get_attr" or is_getitem(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return "empty" not in str(target) and torch.Tag.nondeterministic_seeded not in target.tags


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, *_SYMBOLIC))


def _computed(nodes: Sequence[fx.Node], rows: int, root: torch.nn.Module) -> Any:
    """Compute nodes on the CPU, the batch having so many rows, and return the last one's number."""
    values: dict[fx.Node, Any] = {}

    def given(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else _at(leaf, rows)

    for node in nodes:
        if _is_number(node):
            values[node] = _at(node.meta["val"], rows)
        elif node.op == "get_attr":
            values[node] = getattr(root, str(node.target)).clone()  # which may be written to
        else:
            args, kwargs = pytree.tree_map(given, (node.args, node.kwargs))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[nodes[-1]].item()


def _at(value: Any, rows: int) -> Any:
    """Return a number with every symbol in it, all of which count rows, put in."""
    if not isinstance(value, _SYMBOLIC):
        return value
    expression = value.node.expr
    number = expression.xreplace(dict.fromkeys(expression.free_symbols, rows))
    return bool(number) if isinstance(value, SymBool) else type(value.node.hint)(number)
