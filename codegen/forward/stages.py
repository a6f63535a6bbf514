"""Prints the root's forward, whole or split into pipeline stages.

Stages between the first and the last share one class if they differ only in their layers' numbers,
which the script sets as `first` and `end`. A deep pipeline then takes no more code than one of
three stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from autopar.codegen.forward.body import LOSS_WEIGHTS, BodyBuilder
from autopar.codegen.forward.classes import (
    PrintedForward,
    base_name,
    class_source,
    described,
    forward,
    own_name,
    printed_crossing,
    printed_forward,
)
from autopar.codegen.forward.opened import (
    CrossingTensor,
    OpenedClass,
    StageClass,
    returned,
    store_outputs,
)
from autopar.codegen.forward.opening import Opening
from autopar.codegen.forward.opening.cutting import Cutter, StagePiece
from autopar.codegen.forward.reading.forward_source import LOSS, ROOT, is_plain
from autopar.codegen.forward.reading.modules import (
    FIRST_STAGE,
    LAST_STAGE,
    MIDDLE_STAGE,
    Module,
    is_free,
)
from autopar.codegen.forward.scope import Owner, PrintAgainError
from autopar.codegen.forward.writing.statements import Loop, rolled
from autopar.codegen.text.expressions import Expression, LocalTensor, bare, pieces
from autopar.planner.graph.graph import batch_key
from autopar.planner.graph.layouts import WHOLE
from autopar.planner.graph.ops import Op, TensorOrigin, refs

_POSITIONAL = ("x", "y", "z", "u", "v", "w", *(f"x{i}" for i in range(2, 100)))
_BOUNDS = "self.first : self.end"
_MOST_LISTED = 5  # layers, or runs of them, in a docstring


def printed_stages(opening: Opening, places: Mapping[str, int]) -> tuple[StageClass, ...]:
    """Return the root's classes: one without a pipeline, else one for each stage.

    The last stage returns the model's result, or the loss (see `Cutter.returns_loss`).
    """
    last = max(places.values())
    if last == 0 and _keeps_signature(opening):
        return (_whole(opening),)
    printer = _Printer(opening, Cutter(opening, places, last))
    drafts = [printer.draft(number) for number in range(last + 1)]
    forms = Counter(draft.form for draft in drafts if draft.form is not None)
    return tuple(
        printer.stage(draft, is_shared=draft.form is not None and forms[draft.form] > 1)
        for draft in drafts
    )


def _keeps_signature(opening: Opening) -> bool:
    """Whether the root keeps its signature: its result is plain, and it needs no loss weights."""
    graph, weighed = opening.split.graph, opening.split.weighed
    weighs = any(op.name in weighed and not opening.tree.is_of_loss(op) for op in graph.ops)
    adds_loss = weighs or (LOSS in opening.opened and bool(opening.tree.hidden[LOSS]))
    return is_plain(graph.calls[ROOT].result) and not adds_loss


def _whole(opening: Opening) -> StageClass:
    """Return the class of the whole root, with the signature that the model gives it."""
    printed = printed_forward(opening, ROOT)
    module = opening.split.modules[ROOT]
    base, name = base_name(module), _whole_name(opening)
    paths = tuple(path for path in opening.split.modules if path)
    cls = OpenedClass(
        name=name,
        base=module.home,
        instances=(ROOT,),
        source=class_source(name, base, described(opening, ROOT), printed),
        uses_axis=printed.uses_axis,
    )
    names = tuple(p.name for p in opening.split.graph.parameters)
    names += tuple(b.name for b in opening.split.graph.buffers)
    return StageClass(
        cls=cls, takes=(), gives=(), returns_loss=False, modules=paths, parameters=names
    )


def _whole_name(opening: Opening) -> str:
    return own_name(base_name(opening.split.modules[ROOT]), opening)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A printed stage.

    `printed` loops over its layers by number (`layers[3:7]`). `form`, if there is one, loops over
    `layers[first:end]`, so that stages with equal forms can share a class.
    """

    number: int
    part: StagePiece
    printed: PrintedForward
    form: PrintedForward | None
    bounds: tuple[int, int] | None
    absent: tuple[str, ...]  # outputs that cannot be stored for metrics()


class _Printer:
    def __init__(self, opening: Opening, cutter: Cutter) -> None:
        self.opening, self.cutter = opening, cutter
        self.split, self.tree, self.graph = opening.split, opening.tree, opening.split.graph
        self.last, self.returns_loss = cutter.last, cutter.returns_loss
        self.module = self.split.modules[ROOT]
        self._names = [n for p in self.graph.parameters for n in (p.name, *p.aliases)]

    def draft(self, number: int) -> _Draft:
        """Print one stage."""
        part = self.cutter.part(number)
        builder = self._builder(part)
        result = self._result(part, builder)
        absent = self._store_for_metrics(part, builder)
        body, signature = builder.body(result), self._signature(part, builder)
        module, doc = _with_result(self.module, len(part.gives)), self._docstring(number, part)
        printed = forward(module, body, builder, signature, docstring=doc)
        lines = rolled(
            body.lines,
            builder.owner,
            self.split.modules,
            result=body.result,
            slice_text=_BOUNDS,
        )
        loops = [line.bounds for line in lines if isinstance(line, Loop)]
        form = None
        if len(loops) == 1 and 0 < number < self.last:
            form = forward(module, body, builder, signature, docstring=doc, slice_text=_BOUNDS)
        return _Draft(
            number=number,
            part=part,
            printed=printed,
            form=form,
            bounds=loops[0] if form is not None else None,
            absent=absent,
        )

    def stage(self, draft: _Draft, *, is_shared: bool) -> StageClass:
        """Return a stage; its class is its own, or shared with other stages."""
        base = base_name(self.module)
        bounds: tuple[tuple[str, int], ...] = ()
        printed, name = draft.printed, self._name(draft.number)
        title = f"Stage {draft.number + 1} of {self.last + 1} of {base}{self._layers(draft.part)}."
        if not self.last:
            title = described(self.opening, ROOT)
        if is_shared and draft.form is not None and draft.bounds is not None:
            title = (
                f"A stage between the first and the last of {base}: layers `first` to `end - 1`."
            )
            printed, name = draft.form, MIDDLE_STAGE
            bounds = (("first", draft.bounds[0]), ("end", draft.bounds[1]))
        fields = tuple(f"{key}: int" for key, _ in bounds)
        cls = OpenedClass(
            name=name,
            base=self.module.home,
            instances=(ROOT,),
            source=class_source(name, base, title, printed, fields=fields),
            uses_axis=printed.uses_axis,
        )
        gives = tuple(map(self._crossing, draft.part.gives))
        return StageClass(
            cls=cls,
            takes=tuple(map(self._crossing, draft.part.takes)),
            gives=gives,
            crossing=printed_crossing(self.opening, gives),
            returns_loss=draft.number == self.last and self.returns_loss,
            absent=draft.absent,
            modules=self._modules(draft.part),
            parameters=self._parameters(draft.part),
            bounds=bounds,
        )

    def _layers(self, part: StagePiece) -> str:
        """Return in words the modules with parameters that a stage runs, for its docstring."""
        mine = {op.name for op in part.ops}
        whole = {
            call
            for op in part.ops
            for call in self.tree.chain(op)[2:]  # without LOSS and ROOT
            if all(one.name in mine for one in self.tree.ops[call])
        }
        outer = [c for c in self.tree.chains if c in whole and self.tree.parent(c) not in whole]
        paths = dict.fromkeys(self.graph.calls[call].path for call in outer)
        learning = (path for path in paths if any(map(Owner(self.split, path).holds, self._names)))
        words = [*runs_in_words(learning)]
        return f": {', '.join(words)}" if words and len(words) <= _MOST_LISTED else ""

    def _name(self, number: int) -> str:
        if not self.last:
            return _whole_name(self.opening)
        names = {0: FIRST_STAGE, self.last: LAST_STAGE}
        return names.get(number, f"Stage{number + 1}")

    def _builder(self, part: StagePiece) -> BodyBuilder:
        keys = {name: batch_key(name) for name in self.graph.inputs}
        builder = BodyBuilder(self._opening_of(part), ROOT, ops=part.ops)
        written = set[str]().union(*map(self.graph.index.written_by, part.ops))
        for local in part.takes:
            wishes = [*self.tree.names_in(ROOT, local.tensor), *_POSITIONAL]
            taken = (*keys.values(), *builder.arguments.values())
            builder.bind(local, next(n for n in wishes if n not in taken and is_free(n)))
            if self.graph.tensors[local.tensor].storage in written:
                builder.copy(local)
        for name, key in keys.items():
            builder.bind(LocalTensor(name, self.split.made(name)), key)
        mine = {op.name for op in part.ops}
        for op in part.ops:
            unit = builder.unit(op) if op.call != LOSS else None
            if unit is not None and not {o.name for o in self.tree.ops[unit]} <= mine:
                raise PrintAgainError(unit)
            builder.add(op)
        return builder

    def _opening_of(self, part: StagePiece) -> Opening:
        """Return the opening in which calls that run only partly in this stage are inlined.

        The stage can then compute a mask or a table that is made inside such a call.
        """
        mine = {op.name for op in part.ops}
        calls = {call for op in part.ops for call in self.tree.chain(op)}
        partly = {
            call
            for call in calls - {ROOT, LOSS} - self.opening.inlined
            if not all(op.name in mine for op in self.tree.ops[call])
        }
        among = [op for op in part.ops if not partly.isdisjoint(self.tree.chain(op))]
        if not all(map(self._is_plain, among)):
            return self.opening
        return replace(self.opening, inlined=self.opening.inlined | partly)

    def _is_plain(self, op: Op) -> bool:
        """Whether an op has no gradient and computes the same on every tensor rank."""
        layouts = [self.split.made(name) for name in op.outputs]
        layouts += [self.split.need(op, i) for i in range(len(op.inputs))]
        return not self.graph.learns(op) and all(layout == WHOLE for layout in layouts)

    def _signature(self, part: StagePiece, builder: BodyBuilder) -> list[str]:
        positional = [f"{builder.arguments[local]}: Tensor" for local in part.takes]
        used = {name for op in part.ops for name in op.inputs}
        read = [n for n in self.graph.inputs if n in used or self._is_read(n, builder)]
        batch = [f"{batch_key(name)}: Tensor" for name in read]
        weighs = any(op.name in self.split.weighed for op in part.ops)
        is_all = len(read) == len(self.graph.inputs) and weighs == bool(self.split.weighed)
        batch += [f"{LOSS_WEIGHTS}: Tensor"] if weighs else []
        rest = [] if is_all else ["**_: Tensor"]
        return [*positional, *(["*"] if batch else []), *batch, *rest]

    def _is_read(self, name: str, builder: BodyBuilder) -> bool:
        local = LocalTensor(name, self.split.made(name))
        return any(
            (piece if isinstance(piece, LocalTensor) else piece.value) == local
            for line in builder.lines
            for piece in pieces(line.expression)
        )

    def _result(self, part: StagePiece, builder: BodyBuilder) -> Expression:
        if part.gives:
            values = [builder.value(local.tensor, local.layout) for local in part.gives]
            return bare(values) if len(values) > 1 else values[0]
        if self.returns_loss:
            return builder.value(self.graph.loss, WHOLE)
        return returned(builder, self.graph.calls[ROOT].result)

    def _store_for_metrics(self, part: StagePiece, builder: BodyBuilder) -> tuple[str, ...]:
        """Store the model's outputs for metrics() if this stage returns the loss instead.

        Return the names of those that cannot be stored.
        """
        hides_outputs = self.returns_loss and not part.gives
        if not hides_outputs or not self.split.has_metrics:
            return ()
        return store_outputs(builder, self.graph.calls[ROOT].result)

    def _crossing(self, local: LocalTensor) -> CrossingTensor:
        tensor = self.graph.tensors[local.tensor]
        return CrossingTensor(
            name=local.tensor,
            shape=tensor.shape,
            dtype=tensor.dtype,
            layout=local.layout,
            has_gradient=tensor.requires_grad,
        )

    def _modules(self, part: StagePiece) -> tuple[str, ...]:
        calls = dict.fromkeys(op.call for op in part.ops if op.call not in (LOSS, ROOT))
        paths = [self.graph.calls[call].path for call in calls]
        owner = Owner(self.split, ROOT)
        owners = [
            owner.name_near(name, op).rpartition(".")[0]
            for op in part.ops
            for name in op.inputs
            if self.graph.tensors[name].origin in (TensorOrigin.PARAMETER, TensorOrigin.BUFFER)
        ]
        for key, call in self.graph.calls.items():  # calls without ops, such as nn.Identity
            if key not in self.tree.ops and call.parent in calls:
                calls[key] = None
                paths.append(call.path)
        return tuple(dict.fromkeys(path for path in (*paths, *owners) if path))

    def _parameters(self, part: StagePiece) -> tuple[str, ...]:
        origins = (TensorOrigin.PARAMETER, TensorOrigin.BUFFER)
        read = (name for op in part.ops for name in op.inputs)
        used = [n for n in read if self.graph.tensors[n].origin in origins]
        return tuple(dict.fromkeys((*used, *self._buffers_given(part))))

    def _buffers_given(self, part: StagePiece) -> Iterator[str]:
        """Yield the buffers that are passed to calls, even if they are not read."""
        buffers = {buffer.name for buffer in self.graph.buffers}
        calls = {key for op in part.ops for key in self.graph.index.around(op.call)}
        for call in (self.graph.calls[key] for key in sorted(calls)):
            yield from (n for n in refs((call.arguments, call.keywords)) if n in buffers)

    def _docstring(self, number: int, part: StagePiece) -> str:
        source = "the batch" if not number else "the previous stage's output"
        target = "the next stage's input" if part.gives else "the result"
        if not part.gives and self.returns_loss:
            target = "the loss"
        return f"Compute {target} from {source}."


def _with_result(module: Module, gives: int) -> Module:
    if gives == 0:
        return module
    kind = "Tensor" if gives == 1 else f"tuple[{', '.join(['Tensor'] * gives)}]"
    return replace(module, returns=kind)


def runs_in_words(paths: Iterable[str]) -> Iterator[str]:
    """Yield names of modules, those with consecutive numbers as one: "layers 0 to 3"."""
    for _, run in groupby(enumerate(paths), key=_place_of_run):
        first, *others = [path for _, path in run]
        stem, _, number = first.rpartition(".")
        last = others[-1].rpartition(".")[2] if others else number
        yield first if not others else f"{stem} {number} to {last}".strip()


def _place_of_run(numbered: tuple[int, str]) -> tuple[str, int]:
    """Return a key that modules with consecutive numbers share: list, number minus position."""
    place, path = numbered
    stem, _, number = path.rpartition(".")
    return (stem, int(number) - place) if number.isdigit() else (path, -1)
