"""Finds the calls whose code must be printed, because the plan changes what they do.

Conversions are placed so that few modules must be opened: in a call that is opened already if
possible, else in the innermost call that contains both the op that makes a tensor and the ops that
use it.

Small modules of PyTorch (`nn.Linear`, `nn.Sequential`) are printed inside their callers. Where the
caller's own code loops, as over positions, its printed forward would repeat each line for every
iteration. Such a caller is left as it is if possible, and its small modules are opened instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.forward.opening import (
    Opening,
    calls_given_none,
    calls_missing_state,
    calls_with_backward_inputs,
    calls_with_loops,
    is_changed,
    is_split_random,
    mistakes_sizes,
)
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, CallTree, common
from autopar.codegen.forward.reading.modules import Module
from autopar.codegen.forward.reading.split import SplitGraph
from autopar.planner.graph.layouts import WHOLE, Layout
from autopar.planner.graph.ops import Op, TensorOrigin
from autopar.planner.programs.layouts.opened import is_split
from autopar.planner.rules.rule import is_random

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
    returned. Calls with loops that cannot be kept closed are also opened from the start.
    """
    kept = calls_with_loops(tree) - {*opened, *inlined}
    while True:
        first = _Opener(split, tree, set(opened), set(inlined), called, kept)
        found = first.opening()
        if again := first.late | _callers_of_chains(found):
            second = _Opener(
                split, tree, {*opened, *again}, set(inlined), called, kept - again
            ).opening()
            found = min(found, second, key=lambda one: len(one.opened))
        if kept.isdisjoint(found.printed):
            return found
        kept -= found.printed


def _callers_of_chains(found: Opening) -> frozenset[str]:
    """Return the opened calls that call an opened `nn.Sequential`, which they can contain."""
    tree, modules = found.tree, found.split.modules
    chains = (
        c for c in found.opened - {ROOT, LOSS} if _is_chain(modules.get(tree.graph.calls[c].path))
    )
    return found.opened.intersection(map(tree.parent, chains))


def _is_chain(module: Module | None) -> bool:
    return module is not None and module.is_torch and module.class_name == "Sequential"


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
        kept: frozenset[str],
    ) -> None:
        self.split, self.tree, self.index = split, tree, tree.graph.index
        self.opened, self.inlined, self.called = opened, inlined, called
        self.kept = kept  # calls with loops, which are opened only if their own code must change
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
        """Open a call; small modules of PyTorch are inlined into their callers if possible."""
        while self._is_small(call):
            self.inlined.add(call)
            call = self.tree.parent(call)
        self.opened.add(call)

    def _is_small(self, call: str) -> bool:
        if call in self.inlined:
            return True
        if not self._is_of_torch(call) or call in self.called:
            return False
        around = self.tree.parent(call)
        if around in self.opened:
            return True
        is_chain = bool(self.tree.inside[call])
        return not is_chain and around not in self.kept

    def _is_of_torch(self, call: str) -> bool:
        """Whether a call runs a small module of PyTorch: without inner modules, or a Sequential."""
        if call in (LOSS, ROOT):
            return False
        module = self.split.modules.get(self.tree.graph.calls[call].path)
        is_leaf = module is not None and module.is_torch and not self.tree.inside[call]
        return is_leaf or _is_chain(module)

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
        return tensor in self.tree.entering[call] and self._all_go(tensor, way, inside)

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
        return tensor in self.tree.leaving[call] and self._all_go(tensor, way, outside)

    def _place(self, group: _Group) -> None:
        home = group.home
        while self._is_small(home):
            self.inlined.add(home)
            home = self.tree.parent(home)
        candidates = [home, *group.below, *group.above]
        open_already = [call for call in candidates if call in self.opened]
        usable = [call for call in candidates if call != LOSS] or [LOSS]
        place = (open_already or [call for call in usable if call not in self.kept] or usable)[0]
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
