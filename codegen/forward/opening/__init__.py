"""Decides which calls are printed ("opened"), where values are converted, and where stages are cut.

Also finds calls that read Python state which other code stores on a module or in shared objects.
Printed code stores no such state, and code in another stage stores it on that stage's ranks only.
So these calls are printed, too, and get the tensors and numbers as values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.codegen.forward.reading.forward_source import LOSS, CallTree, common
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.planner.graph.layouts import WHOLE, Layout
from autopar.planner.graph.ops import BATCH, Op, StateChange, TensorOrigin, refs
from autopar.planner.programs.layouts.opened import (
    argument,
    changes_code,
    is_split,
    size_in_arguments,
)
from autopar.planner.rules.rule import OpKind, is_random
from autopar.planner.rules.signature import Dim
from autopar.planner.rules.table import rule_of


def calls_missing_state(opening: Opening) -> list[str]:
    """Return the calls to open, because printed code no longer stores the state that they read."""
    tree, modules, open_calls = opening.tree, opening.split.modules, opening.printed
    calls = tree.graph.calls
    found: dict[str, None] = {}
    for call, chain in tree.chains.items():
        if _is_printed(tree.hidden(call), opening) or _may_read_left_state(call, opening):
            found[call] = None
        if len(chain) < 3:
            continue
        module, unpassed = modules.get(calls[call].path), tree.unpassed(call)
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
        """Return the innermost call around an op that is not inlined: its code runs the op."""
        for call in reversed(self.tree.chain(op)):
            if call not in self.inlined:
                return call
        raise AssertionError(op.name)

    def unit(self, op: Op, scope: str) -> str | None:
        """Return the call, made by the code of `scope`, that runs an op; None if none does."""
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

        What only the backward of an autograd Function may read is passed whole: the graph does not
        show how it is read.
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


def is_split_random(op: Op, split: SplitGraph) -> bool:
    """Whether an op draws random numbers that must differ between ranks."""
    return is_random(op) and any(is_split(split.made(tensor)) for tensor in op.outputs)


def is_changed(op: Op, split: SplitGraph) -> bool:
    """Whether the op itself has another form under the split, apart from conversions."""
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
    return has_size and is_of_rows(split.made(op.outputs[0]), split)


def splits_rows(split: SplitGraph) -> bool:
    """Whether tensor ranks split rows anywhere; printed code then fits one number of rows only."""
    layouts = split.ops.values()
    return any(is_of_rows(one, split) for op in layouts for one in (*op.needs, *op.gives))


def is_of_rows(layout: Layout, split: SplitGraph) -> bool:
    """Whether a layout is split along the batch's rows, whose number varies."""
    return is_split(layout) and layout.axis in split.row_axes


def whole_sizes(op: Op, split: SplitGraph) -> Iterator[Dim]:
    """Yield the dims of an op's result that are not split, and whose sizes the op is given."""
    rule = rule_of(op.target)
    if not rule.sizes and op.inputs and rule.kind is not OpKind.NEW:
        return
    sizes = argument(op, rule.sizes)
    layout = split.made(op.outputs[0])
    for number, dim in enumerate(split.axes.dims[op.outputs[0]]):
        has_size = not isinstance(sizes, tuple) or sizes[number] != -1  # no sizes: a new tensor
        if has_size and not (is_split(layout) and layout.dim == number):
            yield dim


def _converts_own_tensor(op: Op, split: SplitGraph) -> bool:
    """Whether an op reads a parameter, buffer or constant converted, which its own code must do."""
    return any(
        split.made(name) != split.need(op, i)
        for i, name in enumerate(op.inputs)
        if split.graph.tensors[name].origin not in (TensorOrigin.OP, TensorOrigin.INPUT)
    )


def with_own_rows(split: SplitGraph) -> SplitGraph:
    """Return a split in which a rank gets only those rows of the inputs that it uses."""
    if split.batch < split.degree:  # some ranks would have none
        return split
    own = {name: layout for name in split.graph.inputs if (layout := _share(name, split))}
    return replace(split, own_rows=tuple(own), gives=MappingProxyType({**split.gives, **own}))


def _share(name: str, split: SplitGraph) -> Layout | None:
    """Return the layout in which all readers need an input, if each rank needs only its rows."""
    shape = split.graph.tensors[name].shape
    if not shape or shape[0] != BATCH:
        return None
    wanted = {
        split.need(op, position)
        for op in split.graph.ops
        for position, tensor in enumerate(op.inputs)
        if tensor == name
    }
    layout = wanted.pop() if len(wanted) == 1 else WHOLE
    return layout if layout.dim == 0 and is_of_rows(layout, split) else None
