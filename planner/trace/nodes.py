"""Properties of the nodes of an exported program, and the images among its inputs."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autopar.planner.errors import SourceSpan
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Constant, Value
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of
from autopar.planner.trace import record
from autopar.planner.trace.build import TracedSubject

SPANS = "autopar_spans"  # a key of a node's meta
_FEW = 64  # elements: values of larger constants are not kept
_DETACHES = "aten.detach_.default"  # in place, but does not change the values


def is_getitem(node: fx.Node) -> bool:
    """Whether a node selects one of several results."""
    return node.target is operator.getitem


def operands_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node, which torch types as almost anything."""
    return tuple(node.args)


def has_tensor(val: Any) -> bool:
    """Whether the value of a node is, or holds, a tensor."""
    if isinstance(val, (tuple, list)):
        return any(isinstance(item, torch.Tensor) for item in val)
    return isinstance(val, torch.Tensor)


def storage_of(val: torch.Tensor) -> int:
    """Return the identity of a traced tensor's memory."""
    return int(val.untyped_storage()._cdata)


def region_graph(argument: Any) -> fx.Graph | None:
    """Return the nested graph that an argument names (of a no_grad region, say), or None."""
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        owner: Any = argument.graph.owning_module
        for part in str(argument.target).split("."):
            owner = getattr(owner, part)
        return owner.graph if isinstance(owner, fx.GraphModule) else None
    return None


def written_arguments(node: fx.Node) -> tuple[str, ...]:
    """Return the arguments that an op writes to, by its schema."""
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def is_mapped(val: Any) -> bool:
    """Whether a tensor is mapped by torch.vmap: it shows the shape of one row, but has all rows."""
    return isinstance(val, torch.Tensor) and torch._C._functorch.is_batchedtensor(val)


def is_sparse(val: Any) -> bool:
    """Whether a value is a tensor that is not strided."""
    return isinstance(val, torch.Tensor) and val.layout is not torch.strided


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the identities of the memory in which the tensors of nodes lie."""
    leaves = (leaf for node in nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {storage_of(one) for one in tensors if not is_mapped(one) and not is_sparse(one)}


def writers_of(graph: fx.Graph) -> Mapping[int, Sequence[fx.Node]]:
    """Return the ops that write to each memory, by its identity."""
    found = defaultdict[int, list[fx.Node]](list)
    for node in graph.nodes:
        written = written_arguments(node) if str(node.target) != _DETACHES else ()
        if written:
            names = (argument.name for argument in node.target._schema.arguments)
            given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            leaves = pytree.tree_leaves([given.get(name) for name in written])
            for storage in storages_of(leaf for leaf in leaves if isinstance(leaf, fx.Node)):
                found[storage].append(node)
    return found


def spans_of(node: fx.Node) -> tuple[SourceSpan, ...]:
    """Return the expressions of the model that make a node, the innermost one first."""
    spans: tuple[SourceSpan, ...] = node.meta.get(SPANS, ())
    return spans


def keeps_shapes(node: fx.Node) -> bool:
    """Whether a node broadcasts tensors of equal shape, which changes nothing, as in F.mse_loss."""
    if str(node.target) != "aten.broadcast_tensors.default":
        return False
    (given,) = operands_of(node)
    vals = (*(tensor.meta["val"] for tensor in given), *node.meta["val"])
    return len({str(val.shape) for val in vals}) == 1


def bodies(module: torch.nn.Module) -> dict[str, tuple[fx.Node, ...]]:
    """Return, for each recorded call, its nodes from enter to leave, if both are in one graph."""
    found: dict[str, tuple[fx.Node, ...]] = {}
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        nodes, starts = list(part.graph.nodes), {}
        for position, node in enumerate(nodes):
            if str(node.target) == record.ENTER:
                starts[node.args[1]] = position
            elif str(node.target) == record.LEAVE and node.args[1] in starts:
                call = str(node.args[1])
                found[call] = tuple(nodes[starts[call] : position + 1])
    return found


def leaves_tensors(body: Sequence[fx.Node]) -> bool:
    """Whether tensors of a call are read after it, although it does not return them.

    The call has stored them elsewhere: in a child's hook, a class's list, a context variable.
    """
    inside, returned = set(body), set(operands_of(body[-1])[0])
    made = (n for n in body[1:-1] if n not in returned and has_tensor(n.meta.get("val")))
    return any(not inside.issuperset(node.users) for node in made)


def constant(name: str, tensor: Any) -> Constant:
    """Return a constant with its values, if they are known and few."""
    fake = isinstance(tensor, torch._subclasses.FakeTensor)
    if not isinstance(tensor, torch.Tensor) or fake or tensor.is_meta or tensor.numel() > _FEW:
        return Constant(name=name, values=None)
    is_single = tensor.dtype is torch.float32
    return Constant(name=name, values=_nested(tensor.tolist(), is_single=is_single))


def _nested(values: Any, *, is_single: bool) -> Value:
    if isinstance(values, list):
        return tuple(_nested(one, is_single=is_single) for one in values)
    # numpy prints the shortest decimal that equals a number in float32, such as 0.3
    return float(str(np.float32(values))) if is_single else values


def channels_last_inputs(subject: TracedSubject, graph: Graph) -> tuple[str, ...]:
    """Return the images that may be channels_last; () if the model convolves no images.

    The forward is tried with fake channels_last images. If it fails, because its code needs
    contiguous ones (a `view` over channels), the result is (), too.
    """
    is_convolved = any(
        kind_of(op) is OpKind.CONVOLUTION and len(graph.tensors[op.inputs[0]].shape) == _IMAGE_DIMS
        for op in graph.ops
    )
    if not is_convolved:
        return ()
    images = tuple(key for key in sorted(subject.step.keys) if _is_image(subject.batch.get(key)))
    try:
        with FakeTensorMode():
            state = {
                name: torch.empty(value.shape, dtype=value.dtype)
                for name, value in _state_of(subject.model).items()
            }
            batch = {key: _fake(subject.batch[key], key in images) for key in subject.step.keys}
            functional_call(subject.model, state, kwargs=batch, strict=False)
    except Exception:  # the model's code may raise any error
        return ()
    return images


_IMAGE_DIMS = 4


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == _IMAGE_DIMS and value.is_floating_point()


def _state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    tensors = (model.named_parameters, model.named_buffers)
    return {name: value for each in tensors for name, value in each(remove_duplicate=False)}


def _fake(value: Any, is_image: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    order = torch.channels_last if is_image else torch.contiguous_format
    return torch.empty(value.shape, dtype=value.dtype, memory_format=order)
