"""Prints the code that a plan changes; inlines calls that printed code cannot make."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.codegen.forward.classes import (
    PrintedForward,
    base_name,
    class_source,
    described,
    own_name,
    printed_forward,
)
from autopar.codegen.forward.opened import (
    OpenedClass,
    OpenedSource,
    StageClass,
    printed_loss,
    printed_metrics,
)
from autopar.codegen.forward.opening import Opening, splits_rows
from autopar.codegen.forward.opening.cutting import cut_calls, stage_of_ops
from autopar.codegen.forward.opening.opener import open_calls
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, CallTree, call_tree, is_plain
from autopar.codegen.forward.reading.modules import Imported, is_free, named_functions
from autopar.codegen.forward.reading.split import SplitGraph, with_own_rows
from autopar.codegen.forward.scope import PrintAgainError
from autopar.codegen.forward.stages import printed_stages
from autopar.codegen.forward.targets import printed_divisor, valid_targets, weighed_terms
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import batch_key
from autopar.planner.graph.ops import GradientUse, refs
from autopar.planner.plan.declared.limits import gradient_words
from autopar.planner.plan.plan import Plan


def opened_classes(
    plan: Plan, split: SplitGraph, *, is_evaluated: bool = False, has_metrics: bool = False
) -> OpenedSource:
    """Return the classes, stages and functions that a plan's script defines.

    With `is_evaluated`, the terms of the loss are weighted even if a step has one microbatch,
    because an evaluation averages over several microbatches.
    """
    split = replace(split, has_metrics=has_metrics)
    stages = sorted(plan.stages, key=lambda stage: stage.first)
    if plan.arrangement.data * plan.arrangement.microbatches > 1 or is_evaluated:
        split = replace(split, weighed=tuple(op.name for op in weighed_terms(split.graph)))
    # The script's count of valid targets needs all rows of a batch. Without such a count, a tensor
    # rank is given only the rows that its ops read.
    if valid_targets(split, call_tree(split.graph)) is None:
        split = with_own_rows(split)
    return open_split(split, [stage.count for stage in stages], called=_recomputed(plan, split))


def _recomputed(plan: Plan, split: SplitGraph) -> Iterator[str]:
    """Yield the calls of recomputed layers: the runtime wraps modules, so none may be inlined."""
    modes = plan.layer_modes
    for layer, mode in zip(split.layers.layers, modes, strict=True):
        if mode.wraps_layers:
            yield layer.call


def open_split(
    split: SplitGraph,
    stages: Sequence[int],
    *,
    opened: Iterable[str] = (),
    called: Iterable[str] = (),
) -> OpenedSource:
    """Return what a script defines for a split graph; `stages` has each stage's layer count."""
    tree = call_tree(split.graph)
    places = stage_of_ops(split, stages)
    weighed = [tree.chain(op) for op in split.graph.ops if op.name in split.weighed]
    holders = {ROOT if ROOT in chain else LOSS for chain in weighed}
    state = _State(
        opened={*opened} | holders | ({ROOT} if len(stages) > 1 else set()),
        inlined={*cut_calls(tree, places), *(call for chain in weighed for call in chain[2:])},
        called=frozenset(called),
    )
    while True:
        try:
            return _open(split, tree, places, state)
        except PrintAgainError as needed:  # the next attempt opens or inlines one more call
            state.open_or_inline(needed, tree)


@dataclass(slots=True, kw_only=True)
class _State:
    """The calls to open or inline, found so far."""

    opened: set[str]
    inlined: set[str]
    called: frozenset[str]

    def open_or_inline(self, needed: PrintAgainError, tree: CallTree) -> None:
        """Open a call that lacks an argument; inline any other call's code into its caller."""
        key = needed.key
        if key in (ROOT, LOSS):
            raise InputError(f"the code of the model cannot be printed: {needed.reason}")
        if needed.lacks_argument and key not in self.opened | self.inlined:
            self.opened.add(key)
            return
        if key in self.inlined:
            raise InputError(
                f"{key or 'the model'} cannot be printed: {needed.reason or 'it hides a tensor'}"
            )
        self.inlined.add(key)
        self.opened.discard(key)
        outer = [call for call in tree.chains[key][:-1] if call not in self.inlined]
        self.opened.add(outer[-1])


def _open(split: SplitGraph, tree: CallTree, places: dict[str, int], state: _State) -> OpenedSource:
    opening = _opening(split, tree, state)
    _check_own_gradients(opening)
    _check_modes(opening)
    printed = {
        call: printed_forward(opening, call)
        for call in tree.chains
        if call in opening.opened and call not in (ROOT, LOSS)
    }
    _check_calls_agree(printed, opening)
    stages: tuple[StageClass, ...] = ()
    if ROOT in opening.opened:
        stages = printed_stages(opening, places)
    result = split.graph.calls[ROOT].result
    has_loss = stages and (stages[-1].returns_loss or split.graph.loss in refs(result))
    needs_loss = LOSS in opening.opened and not has_loss
    loss = printed_loss(opening) if needs_loss else None
    returns_loss = bool(stages) and stages[-1].returns_loss
    metrics = printed_metrics(opening) if split.has_metrics and not returns_loss else None
    classes = tuple(_classes(printed, opening))
    counts = valid_targets(split, tree)
    divisor = None if counts is None else printed_divisor(split, tree)
    sources = [c.source for c in (*classes, *(stage.cls for stage in stages))]
    sources += [source for source in (loss, counts, divisor) if source is not None]
    sources += [metrics.source] if metrics is not None else []
    sources += [stage.crossing for stage in stages]
    return OpenedSource(
        classes=classes,
        stages=stages,
        loss=loss,
        metrics=None if metrics is None else metrics.source,
        absent=stages[-1].absent if returns_loss else () if metrics is None else metrics.absent,
        valid_targets=counts,
        weighs_terms=bool(split.weighed),
        divisor=divisor,
        inlined=opening.inlined,
        functions=tuple(_applied(split, sources)),
        own_rows=tuple(map(batch_key, split.own_rows)),
        splits_rows=splits_rows(split),
    )


def _applied(split: SplitGraph, sources: Sequence[str]) -> Iterable[Imported]:
    """Yield the functions of the model's files that the printed sources call."""
    for one in sorted(named_functions(split.graph, split.modules)):
        called = re.compile(rf"(?<![.\w]){one.name}(\.apply)?\(")
        if is_free(one.name) and any(map(called.search, sources)):
            yield one


def _check_own_gradients(opening: Opening) -> None:
    """Raise if code to print computes or changes gradients itself: the graph lacks such calls."""
    for own in opening.split.graph.own_gradients:
        if own.call in opening.printed and own.use is not GradientUse.KEPT:
            what = "the loss" if own.call == LOSS else own.call or "the model"
            raise InputError(
                f"the code of {what} has to be printed, and {gradient_words(own)}",
                expected="gradients that autograd alone makes, wherever a plan changes the code",
                fix="write the change as the backward of a torch.autograd.Function, or take the "
                "gradient in a module that the plan leaves as it is",
            )


def _check_modes(opening: Opening) -> None:
    """Raise if code that must be printed calls train() or eval(): the graph lacks such calls."""
    chains, calls = opening.tree.chains, opening.split.graph.calls
    outermost = (
        one
        for one in calls.values()
        if one.mode_is_set and one.parent is not None and not calls[one.parent].mode_is_set
    )
    for call in outermost:
        around = [one for one in chains.get(call.key, ())[1:-1] if one in opening.printed]
        if around:
            mode = "train()" if not opening.split.modules[call.path].trains else "eval()"
            raise InputError(
                f"the code of {around[-1] or 'the model'} has to be printed, and it calls "
                f"{call.path}.{mode}",
                expected="modes of modules that stay as build_model leaves them",
                fix="call it in build_model, and leave it out of the forward: scripts never call "
                "model.train()",
            )


def _opening(split: SplitGraph, tree: CallTree, state: _State) -> Opening:
    """Decide which calls are opened, and where layouts are converted.

    If the loss is opened, but the model returns an object, or the loss reads a tensor that the
    model does not return, the root is opened, too: its forward then contains the loss.
    """
    opening = open_calls(
        split,
        tree,
        opened=sorted(state.opened),
        inlined=sorted(state.inlined),
        called=state.called - state.inlined,
    )
    takes_more = not is_plain(split.graph.calls[ROOT].result) or bool(tree.hidden[LOSS])
    if LOSS in opening.opened and takes_more and ROOT not in opening.opened:
        state.opened.add(ROOT)
        return _opening(split, tree, state)
    return opening


def _check_calls_agree(printed: dict[str, PrintedForward], opening: Opening) -> None:
    """Raise if the calls of one module need different forwards: one call must be inlined."""
    calls = opening.split.graph.calls
    by_path: dict[str, list[str]] = defaultdict(list)
    for call in opening.tree.chains:
        if call not in (ROOT, LOSS) and call not in opening.inlined:
            by_path[calls[call].path].append(call)
    for keys in by_path.values():
        sources = {printed[key].lines if key in printed else None for key in keys}
        if len(sources) > 1:
            key = next(key for key in keys if key in printed)
            raise PrintAgainError(key, reason="its calls differ")


def _classes(printed: dict[str, PrintedForward], opening: Opening) -> Iterable[OpenedClass]:
    """Yield one class for all modules with the same class and the same printed forward."""
    calls, modules = opening.split.graph.calls, opening.split.modules
    alike: dict[tuple[Imported, PrintedForward], list[str]] = defaultdict(list)
    for call, forward in printed.items():
        path = calls[call].path
        if not modules[path].is_importable:
            raise PrintAgainError(call, reason="its class was made at run time")
        paths = alike[modules[path].home, forward]
        if path not in paths:
            paths.append(path)
    taken: set[str] = set()
    for (home, forward), paths in alike.items():
        module = modules[paths[0]]
        base = base_name(module)
        stem = own_name(base, opening)
        name = next(n for n in (stem, *(f"{stem}{i}" for i in range(2, 999))) if n not in taken)
        taken.add(name)
        doc = described(opening, paths[0])
        yield OpenedClass(
            name=name,
            base=home,
            instances=tuple(paths),
            source=class_source(name, base, doc, forward),
            uses_axis=forward.uses_axis,
        )
