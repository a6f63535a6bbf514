"""Says what a layer's parameters occupy on one rank, with gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.costs.layers.flow import LayerFlow
from autopar.planner.layouts import WHOLE, Kind, Layout
from autopar.planner.precision import GRADIENT_BYTES, optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """The weights that a layer shares with others of its rank.

    `held` by an earlier layer, which counts them. `waiting`: this layer or an earlier one uses
    them, and a later one, whose gradient waits in autograd until the earlier ones have added
    theirs.
    """

    held: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()


UNSHARED = SharedWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds of a layer's parameters, before ZeRO divides it."""

    elements: int
    trainable: int
    trainable_tensors: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    replicated_gradient_bytes: int
    waiting_gradient_bytes: int


def layer_parameters(
    flow: LayerFlow, parameters: Mapping[str, Layout], shared: SharedWeights
) -> Held:
    """Return what the parameters of a layer occupy, beside those that an earlier layer holds."""
    pricer = flow.pricer
    used = dict.fromkeys(name for one in flow.ops for name in one.op.inputs)
    names = [name for name in used if name in pricer.parameters and name not in shared.held]
    layouts = {name: parameters.get(name, WHOLE) for name in names}
    elements = {name: pricer.elements(name, layouts[name], flow.degree) for name in names}
    learned = [name for name in names if pricer.parameters[name].trainable]
    trainable = sum(elements[name] for name in learned)
    replicated = [name for name in learned if layouts[name].kind is Kind.REPLICATED]
    return Held(
        elements=sum(elements.values()),
        trainable=trainable,
        trainable_tensors=len(learned),
        parameter_bytes=sum(
            pricer.tensor_bytes(name, layouts[name], flow.degree) for name in names
        ),
        gradient_bytes=GRADIENT_BYTES * trainable,
        optimizer_bytes=sum(
            round(optimizer_bytes(pricer.precision, known.moments) * elements[name])
            for name in learned
            for known in (pricer.parameters[name],)
        ),
        replicated_gradient_bytes=GRADIENT_BYTES * sum(elements[name] for name in replicated),
        waiting_gradient_bytes=_waiting_bytes(flow, parameters, shared.waiting, frozenset(used)),
    )


def _waiting_bytes(
    flow: LayerFlow,
    parameters: Mapping[str, Layout],
    waiting: frozenset[str],
    used: frozenset[str],
) -> int:
    """Return the gradients of shared weights that wait while this layer runs.

    What it makes of them itself is added where they lie; in fp32 it is added out of place, for the
    gradient of a product is a view.
    """
    known = flow.pricer.parameters
    sizes = {
        name: flow.pricer.elements(name, parameters.get(name, WHOLE), flow.degree)
        for name in waiting
        if known[name].trainable
    }
    added = () if flow.pricer.precision.is_half else used & sizes.keys()
    return GRADIENT_BYTES * (sum(sizes.values()) + sum(sizes[name] for name in added))
