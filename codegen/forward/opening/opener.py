"""Finds which calls have to be printed, because the plan changes what they do.

Tells whether a module's own code would take the size of a part for that of a whole, or reversed.

A trace shows sizes as numbers, those of rows as multiples of the batch, and not where they were
read. What a rank has at hand in a module tells what they may be.

Decides which modules get code of their own, and in which of them each conversion stands.

Conversions stand where the fewest modules must be opened: by preference in the innermost call that
sees both the op that makes a tensor and the ops that use it, or in one that is open anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.forward.opening.opening import (
    Opening,
    finds_state,
    given_nothing,
    is_changed,
    is_of_rows,
    is_split,
    is_split_random,
    is_told_own_rows,
    whole_sizes,
)
from autopar.codegen.forward.reading.calls import LOSS, ROOT, CallTree, common
from autopar.codegen.forward.reading.modules import Module
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.planner.findings.loss import counts_rows, numbers
from autopar.planner.graph.layouts import WHOLE, Layout
from autopar.planner.graph.ops import MODULE, Extent, Op, TensorOrigin, Value, objects
from autopar.planner.rules.rule import is_random
from autopar.planner.rules.signature import leaves


def mistakes_sizes(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether a call may take a size for another if it runs as it is; `ops` are its own."""
    if _takes_sizes_of_parts(call, ops, opening):
        return True
    is_told = any(is_told_own_rows(op, opening.split) for op in ops)
    return is_told and not _has_own_rows_alone(call, opening)


def _takes_sizes_of_parts(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether the code of a call may read a size from what a rank has a part of.

    It shapes a whole dim where a part of the same axis is at hand (`_, h, w = x.shape`, of an x
    that is split by rows), or computes with a number that may be such a size (`x.shape[1]`).
    """
    split, tree = opening.split, opening.tree
    made = {name for op in ops for name in op.outputs}
    made.update(*map(tree.leaving, tree.inside[call]))
    layouts = [opening.arrives(name, call) for name in made]
    layouts += [opening.entry(call, name) for name in tree.entering(call)]
    layouts += [split.need(op, i) for op in ops for i in range(len(op.inputs))]
    parts = {layout.axis for layout in layouts if is_split(layout)}
    if not parts:
        return False
    return _computes_with_sizes(call, ops, parts, opening) or _shapes_parts(ops, parts, split)


def may_read_parts(ops: Sequence[Op], split: SplitGraph) -> bool:
    """Whether code that runs some ops may read a size from what a rank has a part of."""
    layouts = [split.need(op, i) for op in ops for i in range(len(op.inputs))]
    layouts += [split.made(name) for op in ops for name in op.outputs]
    parts = {layout.axis for layout in layouts if is_split(layout)}
    if not parts:
        return False
    has_numbers = any(counts_rows(op) or is_told_own_rows(op, split) for op in ops)
    has_constants = not parts <= split.row_axes and any([*numbers(op)] for op in ops)
    return has_numbers or has_constants or _shapes_parts(ops, parts, split)


def _shapes_parts(ops: Sequence[Op], parts: AbstractSet[str], split: SplitGraph) -> bool:
    """Whether an op is told the size of a whole dim of an axis of which a part is at hand."""
    return any(
        not parts.isdisjoint(leaf.name for leaf in leaves(dim))
        for op in ops
        for dim in whole_sizes(op, split)
    )


def _computes_with_sizes(
    call: str, ops: Sequence[Op], parts: AbstractSet[str], opening: Opening
) -> bool:
    """Whether a number in a call may be the size of a part: which ones are is not traced."""
    if any(map(counts_rows, ops)):
        return True
    module = _module(call, opening)
    may_read = module is None or module.reads_sizes
    has_constant = not parts <= opening.split.row_axes
    return may_read and has_constant and any([*numbers(op)] for op in ops)


def _has_own_rows_alone(call: str, opening: Opening) -> bool:
    """Whether a call's code can read numbers of rows from the rank's share alone."""
    tree, module = opening.tree, _module(call, opening)
    if module is None or module.keeps_state:
        return False
    record = tree.graph.calls[call]
    if any(_untold((record.arguments, tuple(value for _, value in record.keywords)))):
        return False
    made = (name for op in tree.ops[call] for name in op.outputs)
    layouts = {name: opening.arrives(name, call) for name in made}
    layouts |= {name: opening.entry(call, name) for name in tree.entering(call)}
    return all(_is_share(name, layout, opening) for name, layout in layouts.items())


def _module(call: str, opening: Opening) -> Module | None:
    """Return the module of a call, None for the loss and for what is none."""
    record = None if call == LOSS else opening.tree.graph.calls[call]
    return opening.split.modules.get(record.path) if record is not None else None


def _untold(given: Value) -> Iterator[Value]:
    """Yield what arguments have that may know a number of rows: numbers of them, objects."""
    if isinstance(given, Extent) and not given.is_constant:
        yield given
    elif isinstance(given, tuple):
        for item in given:
            yield from _untold(item)
    elif isinstance(given, str):
        yield from (name for name in objects(given) if not name.startswith(MODULE))


def _is_share(tensor: str, layout: Layout, opening: Opening) -> bool:
    """Whether a tensor's size that depends on the batch, if any, is the rank's share of it."""
    own = opening.tree.graph.tensors.get(tensor)
    shape = own.shape if own is not None else ()
    varying = [number for number, size in enumerate(shape) if not size.is_constant]
    return not varying or (is_of_rows(layout, opening.split) and varying == [layout.dim])


Way = tuple[Layout, ...]


def open_calls(
    split: SplitGraph,
    tree: CallTree,
    *,
    opened: Sequence[str] = (),
    inlined: Sequence[str] = (),
    called: frozenset[str] = frozenset(),
) -> Opening:
    """Return what to open; `opened` and `inlined` are so in any case, `called` are not inlined."""
    return _Opener(split, tree, set(opened), set(inlined), called).opening()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The users of a tensor that may share one conversion, outermost place first."""

    tensor: str
    layout: Layout
    ops: tuple[Op, ...]
    home: str
    below: tuple[str, ...]  # calls on the way from home to all the users
    above: tuple[str, ...]  # calls that the tensor leaves, from home to its maker


class _Opener:
    def __init__(
        self,
        split: SplitGraph,
        tree: CallTree,
        opened: set[str],
        inlined: set[str],
        called: frozenset[str],
    ) -> None:
        self.split, self.tree, self.index = split, tree, tree.graph.index
        self.opened, self.inlined, self.called = opened, inlined, called
        self.places: dict[tuple[str, str, Layout], str] = {}
        self.leaves: dict[str, tuple[str, Layout]] = {}

    def opening(self) -> Opening:
        """Open what must be, then place conversions where something is open already."""
        own = defaultdict[str, list[Op]](list)
        for op in self.tree.graph.ops:
            own[op.call].append(op)
            if is_changed(op, self.split):
                self._open(op.call)
        for call in self.tree.chains:
            if call != LOSS and self._does_unseen(call) and self._has_split(call):
                self._open(call)
        loss = self.tree.graph.loss
        if self.split.made(loss) != WHOLE:
            self._open(self.index.made_by[loss].call)
        groups = self._groups()
        for group in groups:
            if not group.below and not group.above:
                self._open(group.home)
        for group in groups:
            self._place(group)
        so_far = self._so_far()
        for call, ops in own.items():
            if so_far.is_hidden(ops[0]) and mistakes_sizes(call, ops, so_far):
                self._open(call)
        self._open_for_randomness()
        if self.tree.graph.was_noticed:
            self._open_all_around()
        while found := (*finds_state(self._so_far()), *given_nothing(self._so_far())):
            for call in found:
                self._open(call)
        return self._so_far()

    def _so_far(self) -> Opening:
        return Opening(
            split=self.split,
            tree=self.tree,
            opened=frozenset(self.opened),
            inlined=frozenset(self.inlined),
            places=MappingProxyType(self.places),
            leaves=MappingProxyType(self.leaves),
        )

    def _does_unseen(self, call: str) -> bool:
        """Whether a call runs what the graph does not show: checks of sizes, unused results."""
        record = self.tree.graph.calls[call]
        module = self.split.modules.get(record.path)
        return record.has_unused or (module is not None and module.checks_sizes)

    def _has_split(self, call: str) -> bool:
        """Whether a rank has only a share of something in a call."""
        return any(
            is_split(layout)
            for op in self.tree.ops.get(call, ())
            for layout in (
                *(self.split.need(op, i) for i in range(len(op.inputs))),
                *map(self.split.made, op.outputs),
            )
        )

    def _open(self, call: str) -> None:
        """Open a call; the code of PyTorch's own small modules stands in their caller's."""
        while self._is_small(call):
            self.inlined.add(call)
            call = self.tree.parent(call)
        self.opened.add(call)

    def _is_small(self, call: str) -> bool:
        if call in self.inlined:
            return True
        if call in (LOSS, ROOT) or call in self.called:
            return False
        module = self.split.modules.get(self.tree.graph.calls[call].path)
        is_chain = module is not None and module.class_name == "Sequential"
        return module is not None and module.is_torch and (not self.tree.inside[call] or is_chain)

    # --- conversions -----------------------------------------------------------------------------

    def _groups(self) -> list[_Group]:
        """Return every needed conversion, with the calls in which it may stand."""
        found: dict[tuple[str, Way, str], list[Op]] = defaultdict(list)
        for op in self.tree.graph.ops:
            for i, tensor in enumerate(op.inputs):
                if self.tree.graph.tensors[tensor].origin not in (
                    TensorOrigin.OP,
                    TensorOrigin.INPUT,
                ):
                    continue
                way = self.split.way(op, i)
                for steps in range(2, len(way) + 1):
                    key = (tensor, way[:steps], self._highest(tensor, way[:steps], op))
                    if op not in found[key]:
                        found[key].append(op)
        return [
            self._group(tensor, way, home, tuple(ops)) for (tensor, way, home), ops in found.items()
        ]

    def _maker_chain(self, tensor: str) -> tuple[str, ...]:
        if tensor in self.index.made_by:
            return self.tree.chain(self.index.made_by[tensor])
        in_model = all(ROOT in self.tree.chain(op) for op in self.index.readers[tensor])
        return (LOSS, ROOT) if in_model else (LOSS,)

    def _highest(self, tensor: str, way: Way, op: Op) -> str:
        """Return the outermost call in which a user's input may be converted.

        The code of the loss does not call the model, and so converts nothing for it.
        """
        chain = self.tree.chain(op)
        shared = common([self._maker_chain(tensor), chain])
        place = shared[-1]
        for call in chain[len(shared) :]:
            if call != ROOT and self._is_uniform(tensor, way, call):
                break
            place = call
        return place

    def _is_uniform(self, tensor: str, way: Way, call: str) -> bool:
        """Whether all users in a call want the tensor to go this way first."""
        inside = [op for op in self.index.readers[tensor] if self.tree.is_inside(op, call)]
        return tensor in self.tree.entering(call) and self._all_go(tensor, way, inside)

    def _all_go(self, tensor: str, way: Way, ops: Sequence[Op]) -> bool:
        return all(
            self.split.way(op, i)[: len(way)] == way
            for op in ops
            for i, name in enumerate(op.inputs)
            if name == tensor
        )

    def _group(self, tensor: str, way: Way, home: str, ops: tuple[Op, ...]) -> _Group:
        shared = common([self.tree.chain(op) for op in ops])
        start = shared.index(home) + 1
        below = tuple(call for call in shared[start:] if not self._is_small(call))
        maker = self._maker_chain(tensor)
        above: list[str] = []
        if home in maker and len(way) == 2:
            for call in maker[maker.index(home) + 1 :]:
                if self._is_small(call) or not self._may_leave(tensor, way, call):
                    break
                above.append(call)
        return _Group(
            tensor=tensor, layout=way[-1], ops=ops, home=home, below=below, above=tuple(above)
        )

    def _may_leave(self, tensor: str, way: Way, call: str) -> bool:
        """Whether everything outside a call wants the tensor to go this way."""
        outside = [op for op in self.index.readers[tensor] if not self.tree.is_inside(op, call)]
        return tensor in self.tree.leaving(call) and self._all_go(tensor, way, outside)

    def _place(self, group: _Group) -> None:
        home = group.home
        while self._is_small(home):
            self.inlined.add(home)
            home = self.tree.parent(home)
        candidates = [home, *group.below, *group.above]
        open_already = [call for call in candidates if call in self.opened]
        usable = [call for call in candidates if call != LOSS] or [LOSS]
        place = (open_already or usable)[0]
        self._open(place)
        if place in group.above:
            self.leaves[group.tensor] = (place, group.layout)
            return
        for op in group.ops:
            self.places[op.name, group.tensor, group.layout] = place

    # --- random numbers --------------------------------------------------------------------------

    def _open_for_randomness(self) -> None:
        """See to it that code which is open stands around all that draws different numbers."""
        for op in self.tree.graph.ops:
            if not is_split_random(op, self.split):
                continue
            chain = [call for call in self.tree.chain(op) if call not in self.inlined]
            open_around = [i for i, call in enumerate(chain) if call in self.opened]
            inner = chain[open_around[-1] + 1 :] if open_around else chain
            if not open_around or (inner and self._is_mixed(inner[0])):
                self._open(op.call)

    def _open_all_around(self) -> None:
        """Open what calls opened code: in training it may hand that what no trace has seen."""
        for call in tuple(self.opened):
            for around in self.tree.chains[call]:
                if around != LOSS:
                    self._open(around)

    def _chain_from(self, op: Op, call: str) -> tuple[str, ...]:
        chain = self.tree.chain(op)
        return chain[chain.index(call) :]

    def _is_mixed(self, call: str) -> bool:
        """Whether one region around a call would have equal and different numbers drawn in it.

        Opened code inside has a region of its own for different numbers, and none for equal ones.
        """
        kinds = set()
        for op in self.tree.ops[call]:
            if is_random(op):
                is_split = is_split_random(op, self.split)
                is_open = bool(self.opened.intersection(self._chain_from(op, call)))
                kinds |= set() if is_split and is_open else {is_split}
        return len(kinds) > 1
