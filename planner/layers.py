"""Cuts a graph into layers, and finds equal layers and the tensors that cross between layers.

A layer is a repeated block of the model, or code around the blocks (embedding, head). Equal layers
have the same ops in the same order, on tensors of equal shapes, dtypes and axes. Their costs and
layouts are computed once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph, once_per_graph
from autopar.planner.graph.layouts import Conversion
from autopar.planner.graph.ops import Op, Ref, TensorOrigin, Value
from autopar.planner.precision import Float8, RowEnum
from autopar.planner.rules.rule import OpKind, is_random
from autopar.planner.rules.signature import Leaf, substituted
from autopar.planner.rules.table import kind_of, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The layer of each op, and for each tensor the layer that makes it and those that use it."""

    home: Mapping[str, int]
    maker: Mapping[str, int]
    users: Mapping[str, frozenset[int]]
    cuts: tuple[tuple[str, ...], ...]  # after each layer: tensors that later layers need


@once_per_graph
def residence(graph: Graph, layers: Layers) -> Residence:
    """Return the layers that make and use each tensor, and the borders that it crosses.

    Only tensors that a single stage computes cross borders (see `computed_once`). Other tensors do
    not: each stage that needs one computes it again from the batch, which every stage has.
    """
    home = {op.name: at for at, layer in enumerate(layers.layers) for op in layer.ops}
    maker = {name: home[op.name] for name, op in graph.index.made_by.items()}
    drawn = (name for op in graph.ops if is_random(op) for name in op.outputs)
    once = computed_once(graph, drawn)
    last_use = _last_uses(graph, home, once)
    cuts: list[list[str]] = [[] for _ in layers.layers]
    for name, made in maker.items():
        if name in once:
            for position in range(made, last_use.get(name, made)):
                cuts[position].append(name)
    return Residence(
        home=home,
        maker=maker,
        users={
            name: frozenset(home[op.name] for op in ops)
            for name, ops in graph.index.readers.items()
        },
        cuts=tuple(map(tuple, cuts)),
    )


def computed_once(graph: Graph, drawn: Iterable[str]) -> frozenset[str]:
    """Return the tensors that only one stage computes.

    They are computed from trained weights or from random numbers (`drawn`), or by ops that also
    update a buffer, such as a frozen teacher's batch norm.
    """
    found = {tensor.name for tensor in graph.tensors.values() if tensor.requires_grad}
    found -= {parameter.name for parameter in graph.parameters}
    found.update(drawn)
    found.update(_beside_statistics(graph))
    return frozenset(found.union(*(op.outputs for op in graph.index.reached_from(found))))


def _beside_statistics(graph: Graph) -> Iterator[str]:
    """Yield the results of ops that also write to a buffer."""
    buffers = {buffer.name for buffer in graph.buffers}
    for op in graph.ops:
        if not buffers.isdisjoint(graph.index.written_by(op)):
            yield from (name for name in op.outputs if graph.tensors[name].storage not in buffers)


def _last_uses(graph: Graph, home: Mapping[str, int], once: frozenset[str]) -> Mapping[str, int]:
    """Return the last layer that needs each tensor.

    Tensors outside `once` are computed again where they are needed, so the inputs of their ops are
    needed there, too.
    """
    last: dict[str, int] = {}
    for op in reversed(graph.ops):
        is_again = not once.intersection(op.outputs)
        later = [last[name] for name in op.outputs if is_again and name in last]
        at = max([home[op.name], *later])
        for name in op.inputs:
            last[name] = max(at, last.get(name, at))
    return last


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: its call, its ops in order, and its class."""

    call: str
    ops: tuple[Op, ...]
    layer_class: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClass:
    """All layers that are equal, and the name of their module's class."""

    name: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualLayers:
    """Consecutive equal layers."""

    layer_class: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A graph as a sequence of layers."""

    layers: tuple[Layer, ...]
    classes: tuple[LayerClass, ...]
    runs: tuple[EqualLayers, ...]

    @property
    def largest(self) -> int:
        """The class with the most layers."""
        return max(range(len(self.classes)), key=lambda one: len(self.classes[one].layers))


def compiled_ops(layer: Layer, graph: Graph) -> tuple[Op, ...]:
    """Return the ops of a layer that torch.compile compiles: those inside the layer's module.

    The result is () if torch.compile cannot trace the module's code, or if it has nothing to
    improve: there must be several ops, which it may fuse, or a matrix product, which it may pad.
    """
    call = graph.calls.get(layer.call)
    if call is None or not call.path or call.path in graph.broken:
        return ()
    inside = tuple(op for op in layer.ops if layer.call in graph.index.around(op.call))
    is_product = any(
        rule_of(op.target).contracts and kind_of(op) is not OpKind.CONVOLUTION for op in inside
    )
    return inside if len(inside) > 1 or is_product else ()


def find_layers(graph: Graph, axes: GraphAxes) -> Layers:
    """Return the layers of a graph in the order in which they begin."""
    groups = _assigned(graph, _units(graph))
    forms: dict[Hashable, int] = {}
    layers = tuple(
        Layer(call=call, ops=ops, layer_class=forms.setdefault(_form(ops, graph, axes), len(forms)))
        for call, ops in groups
    )
    members: dict[int, list[int]] = defaultdict(list)
    for position, layer in enumerate(layers):
        members[layer.layer_class].append(position)
    classes = tuple(
        LayerClass(name=_class_name(layers[positions[0]].call, graph), layers=tuple(positions))
        for _, positions in sorted(members.items())
    )
    return Layers(layers=layers, classes=classes, runs=tuple(_runs(layers)))


def _units(graph: Graph) -> list[str]:
    """Return the calls that may be layers: repeated blocks, and the outermost calls beside them."""
    ops_in = graph.index.ops_in
    children: dict[str | None, list[str]] = defaultdict(list)
    for call in ops_in:
        children[graph.calls[call].parent].append(call)
    numbers: dict[Hashable, int] = {}
    forms = {  # calls with equal ops have equal numbers
        call: numbers.setdefault(_form(ops, graph, None), len(numbers))
        for call, ops in ops_in.items()
    }

    def fellows(call: str) -> list[str]:
        kind, parent = graph.calls[call].class_name, graph.calls[call].parent
        return [c for c in children[parent] if graph.calls[c].class_name == kind and children[c]]

    def is_block(call: str) -> bool:
        alike = fellows(call)
        counts = Counter(forms[fellow] for fellow in alike)
        has_equals = any(count > 1 for count in counts.values())
        return call in alike and len(alike) > 1 and (has_equals or not has_block_inside(call))

    def has_block_inside(call: str) -> bool:
        return any(is_block(child) or has_block_inside(child) for child in children[call])

    def expand(call: str) -> Iterator[str]:
        inner = children[call]
        only_holds = inner and len(ops_in[call]) == sum(len(ops_in[c]) for c in inner)
        is_root = graph.calls[call].parent is None
        if not is_root and (is_block(call) or not inner or graph.calls[call].is_function):
            yield call
        elif is_root or only_holds or has_block_inside(call):
            for child in inner:
                yield from expand(child)
        else:
            yield call

    return [unit for root in children[None] for unit in expand(root)]


def _assigned(graph: Graph, units: list[str]) -> list[tuple[str, tuple[Op, ...]]]:
    """Assign every op to one layer; the layers are the units that have parameters.

    Any other op joins the layer before it, or the first layer if none is before it.
    """
    ops_in = graph.index.ops_in
    weighty = {unit for unit in units if any(_has_parameter(op, graph) for op in ops_in[unit])}
    order: list[str] = []
    groups: dict[str, list[Op]] = {}
    early: list[Op] = []
    for op in graph.ops:
        own = next((c for c in graph.index.around(op.call) if c in weighty), None)
        if own is None and not order and _has_parameter(op, graph):
            own = op.call  # weights of the model itself, outside submodules
        if own is not None and own not in groups:
            order.append(own)
            groups[own] = []
        target = own if own is not None else (order[-1] if order else None)
        (groups[target] if target is not None else early).append(op)
    if not order:
        return [("", graph.ops)]
    groups[order[0]][:0] = early
    return [(call, tuple(groups[call])) for call in order]


def _has_parameter(op: Op, graph: Graph) -> bool:
    return any(graph.tensors[name].origin is TensorOrigin.PARAMETER for name in op.inputs)


def _form(ops: tuple[Op, ...], graph: Graph, axes: GraphAxes | None) -> Hashable:
    """Return the canonical form of ops: tensors and axes numbered by first occurrence."""
    numbers: dict[str, int] = {}
    parts: list[Hashable] = []
    met_axes: dict[str, Leaf] = {}

    def axis(leaf: Leaf) -> Leaf:
        # The number distinguishes axes of one name: a dim that joins two parts along one axis can
        # be split, a dim that joins parts along two axes cannot.
        assert axes is not None
        name = f"{axes.names[leaf.name]} {len(met_axes)}"
        return met_axes.setdefault(leaf.name, replace(leaf, name=name))

    def met(name: str) -> Hashable:
        if name in numbers:
            return numbers[name]
        numbers[name] = len(numbers)
        tensor = graph.tensors[name]
        own = axes.dims[name] if axes is not None else ()
        dims = tuple(substituted(dim, axis) for dim in own)
        outside = tensor.origin is TensorOrigin.PARAMETER
        return (numbers[name], tensor.shape, tensor.dtype, tensor.requires_grad, outside, dims)

    def value(argument: Value) -> Hashable:
        if isinstance(argument, Ref):
            return met(argument.tensor)
        if isinstance(argument, tuple):
            return tuple(map(value, argument))
        return (type(argument).__name__, argument)

    for op in ops:
        arguments = tuple((name, value(argument)) for name, argument in op.arguments)
        parts.append((op.target, arguments, op.grad_enabled, tuple(map(met, op.outputs))))
    return tuple(parts)


def _class_name(call: str, graph: Graph) -> str:
    return graph.calls[call].class_name if call in graph.calls else "model"


def _runs(layers: tuple[Layer, ...]) -> Iterator[EqualLayers]:
    first = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end].layer_class != layers[first].layer_class:
            yield EqualLayers(layer_class=layers[first].layer_class, first=first, count=end - first)
            first = end


class Compile(RowEnum):
    """The parts of a model that are compiled with torch.compile."""

    takes_layers: bool  # each layer by itself; layers with equal code share the compiled code
    fuses_messages: bool  # messages between tensor ranks are sent while products are computed
    words: str  # in descriptions of a plan

    NONE = "none", False, False, ""
    LAYERS = "layers", True, False, "compiled layers"
    FUSED = "fused", True, True, "compiled layers with fused messages"


def products_beside(
    graph: Graph, tensor: str, step: Conversion, compiled: Container[str]
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Return the products that inductor fuses with a conversion's messages, forward and backward.

        gather        all products that read the whole tensor; its gradient's reduce-scatter only if
                      nothing else reads the tensor, because a sum of products is no product
        scatter_sum   the product whose partial results are summed; its gradient's gather with the
                      product that gives the gradient of the factor

    All ops must be compiled, and the products must be by a matrix. A product whose kernel also adds
    a bias is not fused; partial results get their bias after the sum. Products with a view between
    them and the message are left out.
    """
    index = graph.index
    if step.function == "scatter_sum":
        maker = index.made_by.get(tensor)
        if maker is None or maker.name not in compiled or not _multiplies(graph, maker):
            return (), ()
        return (maker,), (maker,) * graph.tensors[maker.inputs[0]].requires_grad
    readers = index.readers[tensor]
    if step.function != "gather" or not all(op.name in compiled for op in readers):
        return (), ()
    found = tuple(op for op in readers if op.inputs[0] == tensor and _multiplies(graph, op))
    without_bias = tuple(op for op in found if len(op.inputs) == _FACTORS)
    return without_bias, found if len(readers) == 1 else ()


_FACTORS = 2  # inputs of a product without a bias
_MATRIX_DIMS = 2


def _multiplies(graph: Graph, op: Op) -> bool:
    """Whether an op multiplies a tensor by a parameter that is a matrix."""
    if not rule_of(op.target).contracts or len(op.inputs) < _FACTORS:
        return False
    weight = graph.tensors[op.inputs[1]]
    return weight.origin is TensorOrigin.PARAMETER and len(weight.shape) == _MATRIX_DIMS


LINEAR = "Linear"  # the class of modules that torchao converts


def float8_linears(graph: Graph, layers: Layers, float8: Float8) -> Mapping[str, str]:
    """Map the names of ops that can multiply in float8 to the paths of their linear modules.

    These are trained nn.Linear modules inside compiled layers whose sizes suit the kernels. The
    last products before the loss stay in 16 bits, because a loss is sensitive to its logits.
    """
    trained = {one.name for one in graph.parameters if one.trainable}
    last, calls = last_products(graph), graph.calls
    found = {}
    for op in (op for layer in layers.layers for op in compiled_ops(layer, graph)):
        module = calls.get(op.call or "")
        if module is None or module.class_name != LINEAR or op.name in last:
            continue
        if op.target != "aten.linear.default":
            continue
        weight = graph.tensors[op.inputs[1]]
        if weight.name in trained and all(
            size.is_constant and size.at(0) % float8.multiple == 0 for size in weight.shape
        ):
            found[op.name] = module.path
    return found


def last_products(graph: Graph) -> frozenset[str]:
    """Return the products whose results no other product needs."""
    needed, last = set[str](), set[str]()
    for op in reversed(graph.ops):
        rule, is_needed = rule_of(op.target), not needed.isdisjoint(op.outputs)
        is_product = bool(rule.contracts) or rule.computes is not None
        if is_product and not is_needed:
            last.add(op.name)
        if is_product or is_needed:
            needed.update(op.inputs)
    return frozenset(last)
