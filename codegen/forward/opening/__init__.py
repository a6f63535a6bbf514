"""Decides which calls are printed: opened (in a class of their own) or inlined in their caller.

A module's own code may read a shard's size where it needs the whole size, or the reverse. A trace
shows sizes as numbers, or as multiples of the batch's rows, but not from which tensor they come. So
a call is printed if its code uses sizes and can read a shard, unless its source shows that the
sizes it reads are right.

A call is also printed if it reads Python attributes that other code sets: printed code sets none,
and code of another stage sets them on other ranks. Printed code gets their values directly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from autopar.codegen.forward.reading import SizesRead
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, CallTree, common
from autopar.codegen.forward.reading.modules import Module, bound
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.planner.findings.loss import counts_rows, numbers
from autopar.planner.graph.layouts import WHOLE, Layout
from autopar.planner.graph.ops import (
    MODULE,
    Extent,
    ModuleCall,
    Op,
    Ref,
    StateChange,
    TensorOrigin,
    Value,
    objects,
    refs,
)
from autopar.planner.programs.layouts.opened import (
    argument,
    changes_code,
    is_split,
    size_in_arguments,
)
from autopar.planner.rules.rule import OpKind, is_random
from autopar.planner.rules.signature import Dim, leaves
from autopar.planner.rules.table import rule_of


def calls_missing_state(opening: Opening) -> list[str]:
    """Return the calls to open, because printed code no longer stores the state that they read."""
    tree, modules, open_calls = opening.tree, opening.split.modules, opening.printed
    calls = tree.graph.calls
    found: dict[str, None] = {}
    for call, chain in tree.chains.items():
        if _is_printed(tree.hidden[call], opening) or _may_read_left_state(call, opening):
            found[call] = None
        if len(chain) < 3:
            continue
        module, unpassed = modules.get(calls[call].path), tree.unpassed[call]
        keeps_state = module is not None and module.keeps_state
        if ((keeps_state or unpassed) and chain[-2] in open_calls) or _is_printed(
            unpassed, opening
        ):
            found[call] = None
    for same in _repeated(tree):
        module, shared = modules.get(calls[same[0]].path), common([tree.chains[c] for c in same])
        if module is not None and module.remembers and shared[-1] in open_calls:
            found |= dict.fromkeys(c for call in same for c in tree.chains[call][len(shared) :])
    return [call for call in found if call not in open_calls and not _is_function(call, tree)]


def _is_function(call: str, tree: CallTree) -> bool:
    return call != LOSS and tree.graph.calls[call].is_function


def _may_read_left_state(call: str, opening: Opening) -> bool:
    """Whether a call may read or remove state that printed inner code no longer stores."""
    calls, tree, printed = opening.tree.graph.calls, opening.tree, opening.printed
    if call != LOSS and calls[call].left is StateChange.FOR_A_WHILE:
        return not printed.isdisjoint(tree.chains[call][:-1])
    leaving = (one for one in printed if one != LOSS and calls[one].left is not StateChange.NOTHING)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The opened calls, the inlined calls, and the places of conversions.

    `places` maps an op, an input and a layout to the call that converts this input to this layout.
    `leaves` maps a tensor to a call and a layout: this call converts the tensor to this layout
    before it returns the tensor.
    """

    split: SplitGraph
    tree: CallTree
    opened: frozenset[str]
    inlined: frozenset[str]
    places: Mapping[tuple[str, str, Layout], str]
    leaves: Mapping[str, tuple[str, Layout]]

    @property
    def printed(self) -> frozenset[str]:
        """The calls whose code is printed."""
        return self.opened | self.inlined

    def scope(self, op: Op) -> str:
        """Return the call whose code runs an op: the innermost one that is not inlined."""
        for call in reversed(self.tree.chain(op)):
            if call not in self.inlined:
                return call
        raise AssertionError(op.name)

    def unit(self, op: Op, scope: str) -> str | None:
        """Return the call in the code of `scope` that runs an op; None if `scope` runs it."""
        chain = self.tree.chain(op)
        # the loss may be printed after the model's own code, and call autograd Functions there
        place = chain.index(scope) if scope in chain else chain.index(LOSS)
        below = chain[place + 1 :]
        return next((call for call in below if call not in self.inlined), None)

    def is_hidden(self, op: Op) -> bool:
        """Whether an op runs in a module that is called as it is."""
        return self.scope(op) not in self.opened

    def prints(self, op: Op, call: str) -> bool:
        """Whether a printed forward inside `call` runs an op, and handles its random numbers."""
        chain = self.tree.chain(op)
        return any(inner in self.opened for inner in chain[chain.index(call) :])

    def entry(self, call: str, tensor: str) -> Layout:
        """Return the layout in which a tensor is passed to a call.

        A tensor that only the backward of an autograd Function may read is passed whole: the graph
        does not show how it is read.
        """
        inside = _readers(tensor, call, self.tree)
        if not inside and _is_function(call, self.tree):
            return WHOLE
        arrives = self.arrives(tensor, call)
        for op in inside:
            for layout in reversed(self.split.layouts_of(op, op.inputs.index(tensor))[1:]):
                place = self.places.get((op.name, tensor, layout))
                if place is not None and call not in self.tree.chains[place]:
                    return layout
        return arrives

    def arrives(self, tensor: str, call: str) -> Layout:
        """Return the layout in which a call's code gets a tensor from the call that makes it."""
        left = self.leaves.get(tensor)
        if left is not None and left[0] not in self.tree.chains[call]:
            return left[1]
        return self.split.made(tensor)


def _readers(tensor: str, call: str, tree: CallTree) -> list[Op]:
    return [op for op in tree.graph.index.readers[tensor] if tree.is_inside(op, call)]


def calls_with_backward_inputs(split: SplitGraph, tree: CallTree) -> Iterator[str]:
    """Yield the calls that pass a tensor to an autograd Function whose backward alone reads it.

    Their code has to make the tensor whole.
    """
    for key, record in tree.graph.calls.items():
        given = refs(record.arguments) if record.is_function and tree.ops.get(key) else ()
        for name in given:
            is_partial = name in tree.graph.tensors and split.made(name) != WHOLE
            if is_partial and not _readers(name, key, tree):
                yield tree.parent(key)


def calls_given_none(opening: Opening) -> Iterator[str]:
    """Yield the unopened calls that would get None where the model passes a tensor.

    Their code may read the tensor's sizes, which the graph does not show.
    """
    calls, tensors = opening.tree.graph.calls, opening.tree.graph.tensors
    unused_outputs = {
        name
        for call in opening.printed
        if call in calls
        for name in refs(calls[call].result)
        if name not in tensors
    }
    for key, call in calls.items():
        keywords = tuple(value for _, value in call.keywords)
        given = set(refs((call.arguments, keywords)))
        is_closed = key not in opening.printed and not call.is_function
        if is_closed and not unused_outputs.isdisjoint(given):
            yield key


def calls_with_loops(tree: CallTree) -> frozenset[str]:
    """Return the calls whose code has a loop: a printed forward would unroll it.

    A loop that calls one module of a list after the other does not count: it is printed as a loop.
    """
    graph = tree.graph
    runs = Counter((op.call, op.target, op.spans) for op in graph.ops if op.spans)
    runs.update((one.parent or ROOT, one.path, one.spans) for one in graph.calls.values())
    return frozenset(call for (call, _, _), times in runs.items() if times > 1) - {LOSS}


def is_split_random(op: Op, split: SplitGraph) -> bool:
    """Whether an op draws random numbers that must differ between ranks."""
    return is_random(op) and any(is_split(split.made(tensor)) for tensor in op.outputs)


def is_changed(op: Op, split: SplitGraph) -> bool:
    """Whether the split changes the code of an op, and not only the layouts of its inputs."""
    layout = split.ops.get(op.name)
    return layout is not None and (
        changes_code(op, layout, split.graph, split.axes) or _converts_own_tensor(op, split)
    )


def has_split_row_count(op: Op, split: SplitGraph) -> bool:
    """Whether an op's arguments contain a size that is split along the batch's rows.

    Code that reads the size from a tensor with the same share needs no change.
    """
    layout = split.ops.get(op.name)
    has_size = layout is not None and size_in_arguments(op, layout) is not None
    return has_size and split.is_of_rows(split.made(op.outputs[0]))


def splits_rows(split: SplitGraph) -> bool:
    """Whether tensor ranks split rows anywhere; printed code then fits one number of rows only."""
    layouts = split.ops.values()
    return any(split.is_of_rows(one) for op in layouts for one in (*op.needs, *op.gives))


def whole_sizes(op: Op, split: SplitGraph) -> Iterator[Dim]:
    """Yield the unsplit dims of an op's result whose sizes are arguments of the op."""
    rule = rule_of(op.target)
    if not rule.sizes and op.inputs and rule.kind is not OpKind.NEW:
        return
    sizes = argument(op, rule.sizes)
    layout = split.made(op.outputs[0])
    for number, dim in enumerate(split.axes.dims[op.outputs[0]]):
        has_size = not isinstance(sizes, tuple) or sizes[number] != -1  # no tuple: all sizes
        if has_size and not (is_split(layout) and layout.dim == number):
            yield dim


def _converts_own_tensor(op: Op, split: SplitGraph) -> bool:
    """Whether an op needs a parameter, buffer or constant in another layout than ranks hold."""
    return any(
        split.made(name) != split.need(op, i)
        for i, name in enumerate(op.inputs)
        if split.graph.tensors[name].origin not in (TensorOrigin.OP, TensorOrigin.INPUT)
    )


def mistakes_sizes(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether a call's unchanged code may take a shard's size for a whole size, or the reverse."""
    if _takes_sizes_of_parts(call, ops, opening):
        return True
    has_count = any(has_split_row_count(op, opening.split) for op in ops)
    return has_count and not _has_own_rows_alone(call, opening)


def _takes_sizes_of_parts(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether a call's code may read a size from a shard.

    The code needs the whole size of a dim, and could read it from a tensor that is split there, as
    in `_, h, w = x.shape` if h is split; or it computes with a number that may be a shard's size,
    as in `x.shape[1]`.
    """
    split, tree = opening.split, opening.tree
    made = {name for op in ops for name in op.outputs}
    made.update(*(tree.leaving[inner] for inner in tree.inside[call]))
    layouts = [opening.arrives(name, call) for name in made]
    layouts += [opening.entry(call, name) for name in tree.entering[call]]
    layouts += [split.need(op, i) for op in ops for i in range(len(op.inputs))]
    parts = {layout.axis for layout in layouts if is_split(layout)}
    if not parts:
        return False
    return _computes_with_sizes(call, ops, parts, opening) or _shapes_parts(ops, parts, split)


def may_read_parts(ops: Sequence[Op], split: SplitGraph) -> bool:
    """Whether code that runs some ops may read a size from a shard."""
    layouts = [split.need(op, i) for op in ops for i in range(len(op.inputs))]
    layouts += [split.made(name) for op in ops for name in op.outputs]
    parts = {layout.axis for layout in layouts if is_split(layout)}
    if not parts:
        return False
    has_numbers = any(counts_rows(op) or has_split_row_count(op, split) for op in ops)
    has_constants = not parts <= split.row_axes and any([*numbers(op)] for op in ops)
    return has_numbers or has_constants or _shapes_parts(ops, parts, split)


def _shapes_parts(ops: Sequence[Op], parts: AbstractSet[str], split: SplitGraph) -> bool:
    """Whether an op takes a dim's whole size as a number, though tensors are split along it."""
    return any(
        not parts.isdisjoint(leaf.name for leaf in leaves(dim))
        for op in ops
        for dim in whole_sizes(op, split)
    )


def _computes_with_sizes(
    call: str, ops: Sequence[Op], parts: AbstractSet[str], opening: Opening
) -> bool:
    """Whether a number in a call may be a shard's size; a trace does not show its origin."""
    if any(map(counts_rows, ops)):
        return True
    has_constant = not parts <= opening.split.row_axes
    if not has_constant or not any([*numbers(op)] for op in ops):
        return False
    module = _module(call, opening)
    return module is None or any(
        _may_be_of_part(read, module, opening.tree.graph.calls[call], opening)
        for read in module.sizes_read
    )


def _may_be_of_part(read: SizesRead, module: Module, call: ModuleCall, opening: Opening) -> bool:
    """Whether sizes that a call's code reads may be those of a shard.

    They are not if they certainly belong to an argument that is whole, or split along another dim.
    An op that works in place may exchange the argument's dims.
    """
    tree, given = opening.tree, None
    if read.argument:
        given = dict(bound(module, call.arguments, call.keywords)).get(read.argument)
    if not isinstance(given, Ref) or given.tensor not in tree.graph.tensors:
        return True
    name, layout = given.tensor, opening.entry(call.key, given.tensor)
    if any(op.writes and name in op.inputs for op in tree.ops[call.key]):
        return True
    dims = range(len(tree.graph.tensors[name].shape))
    return is_split(layout) and layout.dim in dims[read.first : read.last]


def _has_own_rows_alone(call: str, opening: Opening) -> bool:
    """Whether every tensor whose rows a call's code can count has only the rank's rows."""
    tree, module = opening.tree, _module(call, opening)
    if module is None or module.keeps_state:
        return False
    record = tree.graph.calls[call]
    if any(_possible_counts((record.arguments, tuple(value for _, value in record.keywords)))):
        return False
    made = (name for op in tree.ops[call] for name in op.outputs)
    layouts = {name: opening.arrives(name, call) for name in made}
    layouts |= {name: opening.entry(call, name) for name in tree.entering[call]}
    return all(_is_share(name, layout, opening) for name, layout in layouts.items())


def _module(call: str, opening: Opening) -> Module | None:
    """Return the module of a call, or None for the loss and autograd Functions."""
    record = None if call == LOSS else opening.tree.graph.calls[call]
    return opening.split.modules.get(record.path) if record is not None else None


def _possible_counts(given: Value) -> Iterator[Value]:
    """Yield the values in arguments that may be or contain a number of rows: sizes, objects."""
    if isinstance(given, Extent) and not given.is_constant:
        yield given
    elif isinstance(given, tuple):
        for item in given:
            yield from _possible_counts(item)
    elif isinstance(given, str):
        yield from (name for name in objects(given) if not name.startswith(MODULE))


def _is_share(tensor: str, layout: Layout, opening: Opening) -> bool:
    """Whether a tensor has only the rank's rows, or no dim that depends on the batch."""
    own = opening.tree.graph.tensors.get(tensor)
    shape = own.shape if own is not None else ()
    varying = [number for number, size in enumerate(shape) if not size.is_constant]
    return not varying or (opening.split.is_of_rows(layout) and varying == [layout.dim])
