"""Says what a layer's parameters occupy on one rank, with gradients and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.costs.layers.flow import LayerFlow
from autopar.planner.layouts import WHOLE, Kind, Layout
from autopar.planner.precision import GRADIENT_BYTES, optimizer_bytes


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


def layer_parameters(
    flow: LayerFlow, parameters: Mapping[str, Layout], counted: frozenset[str]
) -> Held:
    """Return what the parameters of a layer occupy; those that are `counted` lie elsewhere."""
    pricer = flow.pricer
    used = dict.fromkeys(name for one in flow.ops for name in one.op.inputs)
    names = [name for name in used if name in pricer.parameters and name not in counted]
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
    )
