"""Finds a loss whose logits can be made in chunks of rows, and says what the chunks cost.

`runtime/tensor/chunked_logits.py` makes each chunk's logits, their loss and their gradients before
the next chunk, so that the logits never exist all at once. The gradients of the linear layer wait
for the backward. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.planner.costs.layers.flow import (
    LayerFlow,
    LayerMemory,
    MemoryPlace,
    PlacedOp,
    learned_elements,
    result_bytes,
    working_bytes,
)
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op, TensorOrigin, refs
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of, rule_of

LOSS_CHUNKS = 8  # as in torchtune; another chunk reads and writes the weight's gradient once more

_LINEAR = "aten.linear."
_OF_ROWS = frozenset({OpKind.VIEW, OpKind.PART, OpKind.CONTIGUOUS, OpKind.CAST, OpKind.COPY})
_OF_NUMBERS = frozenset({OpKind.MULTIPLICATION, OpKind.DIVISION, OpKind.EXPONENTIAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """A loss over the classes of a linear layer: `ops` lead from this layer to the loss."""

    ops: tuple[Op, ...]  # the linear layer first, the loss last

    @property
    def path(self) -> tuple[str, ...]:
        """The tensors that exist only in chunks."""
        return tuple(name for op in self.ops[:-1] for name in op.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChunks:
    """Why a layer has no loss that can be made in chunks, and where the code shows it."""

    why: str
    where: str = ""


def chunked_loss(ops: Sequence[Op], graph: Graph) -> ChunkedLoss | NoChunks:
    """Return the loss of a layer that can be made in chunks, or why it has none.

    Such a loss is the layer's only cross entropy. It has one target for each row, and a single
    number as its result. Nothing else reads its logits. They come from a module that is just a
    linear layer, through ops that treat each row by itself.
    """
    losses = [op for op in ops if kind_of(op) is OpKind.CROSS_ENTROPY]
    if len(losses) != 1:
        return NoChunks(why=f"it has {len(losses)} cross entropies, not one")
    path = losses
    while not path[0].target.startswith(_LINEAR):
        maker = graph.index.made_by.get(path[0].inputs[0])
        if maker not in ops or not _leads_on(path[0], graph):
            why = f"{path[0].name} does not treat its logits row by row, or other ops read them"
            return NoChunks(why=why, where=path[0].location)
        assert maker is not None
        path.insert(0, maker)
    fault = _fault(path[0], graph)
    return NoChunks(why=fault, where=path[0].location) if fault else ChunkedLoss(ops=tuple(path))


def _leads_on(op: Op, graph: Graph) -> bool:
    """Whether an op treats each row of the logits by itself, and no other op reads them."""
    logits = op.inputs[0]
    if graph.index.readers[logits] != (op,) or graph.index.is_written_later(logits):
        return False
    if kind_of(op) is OpKind.CROSS_ENTROPY:
        return _is_one_number(op, graph)
    shapes = [graph.tensors[name].shape for name in (logits, *op.outputs)]
    rule, kind = rule_of(op.target), kind_of(op)
    is_of_rows = kind in _OF_ROWS and not rule.permutes
    is_of_numbers = kind in _OF_NUMBERS and rule.is_elementwise
    is_alone = len(op.inputs) == len(op.outputs) == 1 and not op.writes
    same_classes = len({shape[-1:] for shape in shapes}) == 1
    return is_alone and same_classes and (is_of_rows or is_of_numbers)


_WHOLE = (1, 2)  # torch's numbers of the reductions "mean" and "sum"


def _is_one_number(loss: Op, graph: Graph) -> bool:
    given = dict(loss.arguments)
    (target,) = refs(given["target"])
    is_listed = graph.tensors[target].is_whole_numbered
    flat = [len(graph.tensors[name].shape) for name in (loss.inputs[0], target)]
    return given.get("reduction", 1) in _WHOLE and is_listed and flat == [2, 1]


def _fault(op: Op, graph: Graph) -> str:
    """Return why a product is not the only op of a linear module; "" if it is."""
    call, (x, *given) = graph.calls.get(op.call), op.inputs
    if call is None or call.is_function or graph.index.ops_in[op.call] != (op,):
        return f"{op.name} is not the only op of a module"
    if sum(one.path == call.path for one in graph.calls.values()) > 1:
        return f"{call.path} is called several times"
    if graph.tensors[x].origin is not TensorOrigin.OP:
        return f"the input of {call.path} is not made by the model"
    names = {n: one.name for one in graph.parameters for n in (one.name, *one.aliases)}
    own = [names.get(f"{call.path}.{name}") for name in ("weight", "bias")]
    return "" if [*filter(None, own)] == given else f"{call.path} uses weights other than its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """What a loss in chunks costs on one rank, beyond the same ops without chunks.

    bytes moved = 2 · (chunks − 1) · gradient of the weight     each chunk adds its part
                + 2 · gradients                  the backward multiplies them by the loss's gradient
    Not counted: products of fewer rows may be less efficient.
    """

    product: PlacedOp
    loss: PlacedOp
    names: frozenset[str]  # of all ops from the product to the loss
    path: frozenset[str]  # the tensors that exist only in chunks
    weight_bytes: int  # of the gradients of weight and bias
    gradient_bytes: int  # of all gradients that wait for the backward
    moved_bytes: int
    launches: int
    inside_seconds: float  # how much longer the messages of a loss over split classes take


def chunking_of(flow: LayerFlow) -> Chunking | None:
    """Return what a layer's loss in chunks costs; None if it cannot be made in chunks."""
    pricer = flow.pricer
    found = chunked_loss([one.op for one in flow.ops], pricer.graph)
    if isinstance(found, NoChunks) or pricer.precision.scales_loss:
        return None
    kept = {*found.path, *found.ops[0].inputs[1:]}
    if any(one.tensor in kept for one in flow.conversions):
        return None  # ranks exchange logits, or take their shard of a whole weight
    placed = {one.op.name: one for one in flow.ops}
    product, loss = placed[found.ops[0].name], placed[found.ops[-1].name]
    weights = sum(learned_elements(flow, product)) * pricer.precision.item_bytes
    x = product.op.inputs[0]
    gradient_bytes = weights + pricer.tensor_bytes(x, product.layout_of(x), flow.degree)
    ops = [placed[op.name] for op in found.ops]
    inside = pricer.inside_seconds(loss.op, loss.split, flow.shape, chunks=LOSS_CHUNKS)
    return Chunking(
        product=product,
        loss=loss,
        names=frozenset(op.name for op in found.ops),
        path=frozenset(found.path),
        weight_bytes=weights,
        gradient_bytes=gradient_bytes,
        moved_bytes=2 * (LOSS_CHUNKS - 1) * weights + 2 * gradient_bytes,
        launches=(LOSS_CHUNKS - 1) * sum(sum(one.launches) for one in ops),
        inside_seconds=LOSS_CHUNKS * inside - loss.inside_seconds,
    )


def chunked_memory(
    flow: LayerFlow, chunking: Chunking, plain: LayerMemory, everything: Mapping[MemoryPlace, int]
) -> LayerMemory:
    """Return the memory if the loss makes the logits in chunks; `plain` is that without chunks.

    A chunk has its part of all tensors between the linear layer and the loss. The gradients that
    wait count as saved; that of the weight is freed when the linear layer's backward runs.
    """
    roots = {flow.pricer.memory.root(name) for name in chunking.path}
    made = {f"{name}:made" for name in chunking.names}
    saved = {place: size for place, size in everything.items() if place[0] not in roots | made}
    inside = sum(size for (root, _), size in everything.items() if root in made)
    inside += result_bytes(flow, chunking.product) + working_bytes(flow, chunking.loss)
    others = (one for one in flow.ops if one.op.name not in chunking.names)
    working = max((working_bytes(flow, one) for one in others), default=0)
    return LayerMemory(
        saved_bytes=sum(saved.values()) + chunking.gradient_bytes,
        transient_bytes=max(working, -(-inside // LOSS_CHUNKS)),
        learning_bytes=-chunking.weight_bytes,
        learned_gradient_bytes=plain.learned_gradient_bytes,
        deferred_bytes=0,
    )
