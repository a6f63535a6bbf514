"""Tells which ops of a graph need other code than the user's under a split, and why."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.codegen.forward.reading.split import Split
from autopar.planner.axes.terms import Dim, Leaf
from autopar.planner.findings.random_ops import is_random
from autopar.planner.graph import Op, Origin, Value
from autopar.planner.layouts import Kind, Layout

# The argument that holds sizes of the result, and those that hold sizes along a dim of the input.
RESULT_SIZES = {
    "aten.view.default": "size",
    "aten._unsafe_view.default": "size",
    "aten.reshape.default": "shape",
    "aten.expand.default": "size",
    "aten.broadcast_to.default": "size",
}
REPEATS = frozenset({"aten.repeat.default", "aten.repeat_interleave.self_int"})
PART_SIZES = frozenset(
    {
        "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default",
        "aten.slice.Tensor", "aten.narrow.default", "aten.index.Tensor", "aten.unflatten.int",
    }
)  # fmt: skip
VOCABULARY = frozenset({"aten.embedding.default"})
LOSSES = frozenset({"aten.cross_entropy_loss.default"})
CONVOLUTIONS = frozenset(
    {
        "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
        "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding",
        "aten.conv_transpose1d.default", "aten.conv_transpose2d.input",
        "aten.conv_transpose3d.input",
    }
)  # fmt: skip


def argument(op: Op, name: str) -> Value:
    """Return an argument of an op, None where it has none of this name."""
    return next((value for key, value in op.arguments if key == name), None)


def is_split(layout: Layout) -> bool:
    """Whether a layout is a split one."""
    return layout.kind is Kind.SPLIT


def is_split_random(op: Op, split: Split) -> bool:
    """Whether an op draws numbers that must differ from rank to rank."""
    return is_random(op) and any(is_split(split.made(tensor)) for tensor in op.outputs)


def is_changed(op: Op, split: Split) -> bool:
    """Whether the op's own code is another under the split, its conversions aside."""
    layout = split.ops.get(op.name)
    if layout is None:
        return False
    return (
        _has_local_size(op, split)
        or is_vocabulary_split(op, split)
        or has_local_groups(op, split)
        or _converts_own_tensor(op, split)
    )


def is_vocabulary_split(op: Op, split: Split) -> bool:
    """Whether an embedding, or a loss, is split along the vocabulary."""
    if op.target in VOCABULARY:
        weight = split.need(op, 0)
        return is_split(weight) and weight.dim == 0
    if op.target in LOSSES:
        logits = split.need(op, 0)
        return is_split(logits) and logits.dim == 1
    return False


def has_local_groups(op: Op, split: Split) -> bool:
    """Whether the groups of a convolution or norm are split, so that a rank has fewer."""
    channels = split.need(op, 0) if op.inputs else None
    if channels is None or not is_split(channels) or channels.dim != 1:
        return False
    if op.target == "aten.group_norm.default":
        return True
    # Channels may be split inside of every group instead: then a rank has as many groups.
    groups = split.axes.ops[op.name].signature.letters.get("g")
    is_of_groups = isinstance(groups, Leaf) and split.ops[op.name].letter == groups.name
    return op.target in CONVOLUTIONS and is_of_groups


def is_told_own_rows(op: Op, split: Split) -> bool:
    """Whether an op is told a rank's share of a size that depends on the batch.

    Code that reads it from a tensor of which the rank has the same share needs no change.
    """
    return _told_size(op, split) is not None and is_of_rows(split.made(op.outputs[0]), split)


def is_of_rows(layout: Layout, split: Split) -> bool:
    """Whether a layout is split along the rows of a batch, whose number is no constant."""
    return is_split(layout) and layout.axis in split.row_axes


def _told_size(op: Op, split: Split) -> Value:
    """Return the size along the split dim that an op is told, None where it is told none."""
    if op.target in REPEATS:
        return _told_repeats(op, split)
    if op.target not in RESULT_SIZES:
        return None
    sizes, layout = argument(op, RESULT_SIZES[op.target]), split.made(op.outputs[0])
    if not is_split(layout) or not isinstance(sizes, tuple) or sizes[layout.dim] == -1:
        return None
    return sizes[layout.dim]


def _told_repeats(op: Op, split: Split) -> Value:
    made, given = split.made(op.outputs[0]), argument(op, "repeats")
    if not is_split(made) or is_split(split.need(op, 0)):
        return None
    return given[made.dim] if isinstance(given, tuple) else given


def _has_local_size(op: Op, split: Split) -> bool:
    if op.target in RESULT_SIZES or op.target in REPEATS:
        return _told_size(op, split) is not None and not is_told_own_rows(op, split)
    if op.target in PART_SIZES:
        layout, dim = split.need(op, 0), argument(op, "dim")
        rank = len(split.graph.tensors[op.inputs[0]].shape)
        return is_split(layout) and isinstance(dim, int) and dim % rank == layout.dim
    return False


def whole_sizes(op: Op, split: Split) -> Iterator[Dim]:
    """Yield the dims whose sizes an op is told, and of which a rank has all."""
    if op.target not in RESULT_SIZES and op.inputs and not op.target.startswith("aten.new_"):
        return
    sizes = argument(op, RESULT_SIZES.get(op.target, ""))
    layout = split.made(op.outputs[0])
    for number, dim in enumerate(split.axes.dims[op.outputs[0]]):
        is_told = not isinstance(sizes, tuple) or sizes[number] != -1  # or made anew
        if is_told and not (is_split(layout) and layout.dim == number):
            yield dim


def _converts_own_tensor(op: Op, split: Split) -> bool:
    """Whether a parameter, buffer or constant is converted, which only this code can do."""
    return any(
        split.made(name) != split.need(op, i)
        for i, name in enumerate(op.inputs)
        if split.graph.tensors[name].origin not in (Origin.OP, Origin.INPUT)
    )
