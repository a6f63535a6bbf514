"""Finds the calls whose code must be printed, because the plan changes what they do.

A module's own code may take a shard's size for that of the whole dim, or the reverse. A trace shows
sizes as numbers, or as multiples of the batch's rows, but not which tensor they were read from. So
the layouts of all tensors that a module's code can read decide which of its sizes may be wrong.

Conversions are placed so that few modules must be opened: in a call that is opened already if
possible, else in the innermost call that contains both the op that makes a tensor and the ops that
use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.forward.opening import (
    Opening,
    calls_given_none,
    calls_missing_state,
    calls_with_backward_inputs,
    has_split_row_count,
    is_changed,
    is_of_rows,
    is_split_random,
    whole_sizes,
)
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, CallTree, common
from autopar.codegen.forward.reading.modules import Module
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.planner.findings.loss import counts_rows, numbers
from autopar.planner.graph.layouts import WHOLE, Layout
from autopar.planner.graph.ops import MODULE, Extent, Op, TensorOrigin, Value, objects
from autopar.planner.programs.layouts.opened import is_split
from autopar.planner.rules.rule import is_random
from autopar.planner.rules.signature import leaves


def mistakes_sizes(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether a call's unchanged code may take a shard's size for a whole size, or the reverse."""
    if _takes_sizes_of_parts(call, ops, opening):
        return True
    has_count = any(has_split_row_count(op, opening.split) for op in ops)
    return has_count and not _has_own_rows_alone(call, opening)


def _takes_sizes_of_parts(call: str, ops: Sequence[Op], opening: Opening) -> bool:
    """Whether a call's code may read a size from a shard.

    The code uses the whole size of a dim while a shard of the same axis is available, as in
    `_, h, w = x.shape` if h is split; or it computes with a number that may be a shard's size, as
    in `x.shape[1]`.
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
    module = _module(call, opening)
    may_read = module is None or module.reads_sizes
    has_constant = not parts <= opening.split.row_axes
    return may_read and has_constant and any([*numbers(op)] for op in ops)


def _has_own_rows_alone(call: str, opening: Opening) -> bool:
    """Whether all tensors whose rows a call's code can count have only the rank's own rows."""
    tree, module = opening.tree, _module(call, opening)
    if module is None or module.keeps_state:
        return False
    record = tree.graph.calls[call]
    if any(_possible_counts((record.arguments, tuple(value for _, value in record.keywords)))):
        return False
    made = (name for op in tree.ops[call] for name in op.outputs)
    layouts = {name: opening.arrives(name, call) for name in made}
    layouts |= {name: opening.entry(call, name) for name in tree.entering(call)}
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
    """Whether a tensor's batch-dependent size, if any, is the rank's share."""
    own = opening.tree.graph.tensors.get(tensor)
    shape = own.shape if own is not None else ()
    varying = [number for number, size in enumerate(shape) if not size.is_constant]
    return not varying or (is_of_rows(layout, opening.split) and varying == [layout.dim])


Way = tuple[Layout, ...]  # the layouts that a tensor is converted to, one after the other


def open_calls(
    split: SplitGraph,
    tree: CallTree,
    *,
    opened: Sequence[str] = (),
    inlined: Sequence[str] = (),
    called: frozenset[str] = frozenset(),
) -> Opening:
    """Decide which calls to open, besides `opened` and `inlined`; `called` are never inlined.

    For some calls only the placed conversions show that they must be opened. Then conversions are
    placed again, with these calls opened from the start. The result with fewer opened calls is
    returned.
    """
    first = _Opener(split, tree, set(opened), set(inlined), called)
    found = first.opening()
    if not first.late:
        return found
    again = _Opener(split, tree, {*opened, *first.late}, set(inlined), called).opening()
    return min(found, again, key=lambda one: len(one.opened))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The ops that share one conversion of a tensor, and the calls that may contain it."""

    tensor: str
    layout: Layout
    ops: tuple[Op, ...]
    home: str  # the outermost of these calls
    below: tuple[str, ...]  # calls inside home that contain all of `ops`
    above: tuple[str, ...]  # calls inside home that return the tensor, outermost first


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
        self.late: frozenset[str] = frozenset()  # opened after conversions were placed

    def opening(self) -> Opening:
        """Return the calls to open, and where conversions are: in opened calls if possible."""
        own = defaultdict[str, list[Op]](list)
        for op in self.tree.graph.ops:
            own[op.call].append(op)
            if is_changed(op, self.split):
                self._open(op.call)
        for call in self.tree.chains:
            if call != LOSS and self._does_unseen(call) and self._has_split(call):
                self._open(call)
        for call in calls_with_backward_inputs(self.split, self.tree):
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
        before, so_far = frozenset(self.opened), self._so_far()
        for call, ops in own.items():
            if so_far.is_hidden(ops[0]) and mistakes_sizes(call, ops, so_far):
                self._open(call)
        self._open_for_randomness()
        if self.tree.graph.was_noticed:
            self._open_all_around()
        while found := (*calls_missing_state(self._so_far()), *calls_given_none(self._so_far())):
            for call in found:
                self._open(call)
        self.late = frozenset(self.opened - before)
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
        """Whether a call runs code that leaves no op in the graph: checks, unused results."""
        record = self.tree.graph.calls[call]
        module = self.split.modules.get(record.path)
        return record.has_unused or (module is not None and module.checks_sizes)

    def _has_split(self, call: str) -> bool:
        """Whether an op in a call reads or makes a tensor of which a rank has only a shard."""
        return any(
            is_split(layout)
            for op in self.tree.ops.get(call, ())
            for layout in (
                *(self.split.need(op, i) for i in range(len(op.inputs))),
                *map(self.split.made, op.outputs),
            )
        )

    def _open(self, call: str) -> None:
        """Open a call; small modules of PyTorch are inlined into their callers instead."""
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
        """Return every needed conversion, with the calls that may contain it."""
        found: dict[tuple[str, Way, str], list[Op]] = defaultdict(list)
        for op in self.tree.graph.ops:
            for i, tensor in enumerate(op.inputs):
                if self.tree.graph.tensors[tensor].origin not in (
                    TensorOrigin.OP,
                    TensorOrigin.INPUT,
                ):
                    continue
                way = self.split.layouts_of(op, i)
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
        """Return the outermost call that may convert a tensor for an op.

        The loss's code does not call the model, so it converts nothing for the model's ops.
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
        """Whether a call takes a tensor, and every read of it inside needs these conversions."""
        inside = [op for op in self.index.readers[tensor] if self.tree.is_inside(op, call)]
        return tensor in self.tree.entering(call) and self._all_go(tensor, way, inside)

    def _all_go(self, tensor: str, way: Way, ops: Sequence[Op]) -> bool:
        return all(
            self.split.layouts_of(op, i)[: len(way)] == way
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
        """Whether a call returns a tensor, and all its readers outside need these conversions."""
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
        """Open calls so that printed code surrounds all ops whose random numbers differ by rank."""
        for op in self.tree.graph.ops:
            if not is_split_random(op, self.split):
                continue
            chain = [call for call in self.tree.chain(op) if call not in self.inlined]
            open_around = [i for i, call in enumerate(chain) if call in self.opened]
            inner = chain[open_around[-1] + 1 :] if open_around else chain
            if not open_around or (inner and self._is_mixed(inner[0])):
                self._open(op.call)

    def _open_all_around(self) -> None:
        """Open the callers of opened code.

        In training they may pass arguments that no trace saw.
        """
        for call in tuple(self.opened):
            for around in self.tree.chains[call]:
                if around != LOSS:
                    self._open(around)

    def _chain_from(self, op: Op, call: str) -> tuple[str, ...]:
        chain = self.tree.chain(op)
        return chain[chain.index(call) :]

    def _is_mixed(self, call: str) -> bool:
        """Whether a call draws some random numbers that all ranks share, and some that differ.

        Numbers that differ do not count in opened code, which has its own `split_randomness`.
        """
        kinds = set()
        for op in self.tree.ops[call]:
            if is_random(op):
                is_split = is_split_random(op, self.split)
                is_open = bool(self.opened.intersection(self._chain_from(op, call)))
                kinds |= set() if is_split and is_open else {is_split}
        return len(kinds) > 1
