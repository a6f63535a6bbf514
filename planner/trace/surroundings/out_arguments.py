"""Reads `torch.div(x, y, out=buffer)` as an op that makes a tensor, and a copy into the buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def without_outs(program: torch.nn.Module) -> None:
    """Replace every op that is given the one tensor to write to, in a graph and those within."""
    for part in program.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                plain = _plain(node)
                if plain is not None:
                    _replace(node, plain)


def _plain(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the overload of an op that takes the same but the tensor to write to."""
    if not isinstance(node.target, torch._ops.OpOverload) or "out" not in node.kwargs:
        return None
    given = _taken(node.target)
    packet: Any = node.target.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((one for one in overloads if one is not node.target and _taken(one) == given), None)


def _taken(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    arguments = op._schema.arguments
    return [(one.name, str(one.type)) for one in arguments if not one.is_out]


def _replace(node: fx.Node, plain: torch._ops.OpOverload) -> None:
    written, others = node.kwargs["out"], {k: v for k, v in node.kwargs.items() if k != "out"}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(plain, node.args, others)
        copied = node.graph.call_function(torch.ops.aten.copy_.default, (written, made))
    made.meta = {**node.meta, "val": torch.empty_like(node.meta["val"])}
    copied.meta = dict(node.meta)
    node.replace_all_uses_with(copied)
    node.graph.erase_node(node)
