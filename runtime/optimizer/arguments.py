"""Gives a model file's build_optimizer what it takes: parameters, named ones, or the model."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.user_code import place_of, told

OptimizerFactory: TypeAlias = Callable[[Any], Optimizer]

MODEL, NAMED = "model", "named_parameters"  # names of the one argument that ask for these


def asked_by(factory: OptimizerFactory) -> str:
    """Return the name of the one argument of a build_optimizer."""
    return next(iter(inspect.signature(factory).parameters), "")


def made_optimizer(
    factory: OptimizerFactory, parts: Sequence[nn.Module], stepped: Sequence[nn.Parameter]
) -> Optimizer:
    """Call a factory with what the name of its argument asks for, of what this rank holds.

    `stepped` are the parameters that learn. A stage without any is given one that holds nothing.
    Leaves where the factory fails, or returns what no script can step.
    """
    name = "build_optimizer() of the model file" if place_of(factory) else "the optimizer"
    with told(name, factory):
        optimizer = _called(factory, parts, stepped)
    fault = fault_of_optimizer(optimizer)
    if fault:
        refuse(f"{name} {fault}", fix=f"look at {place_of(factory) or 'build_optimizer()'}")
    return optimizer


def fault_of_optimizer(optimizer: Any) -> str:
    """Return what no script can step an optimizer for; "" where there is nothing."""
    if not isinstance(optimizer, Optimizer):
        return f"returns a {type(optimizer).__name__}, which is no torch.optim.Optimizer"
    counts = Counter(id(one) for group in optimizer.param_groups for one in group["params"])
    twice = sum(count > 1 for count in counts.values())
    return f"gives the optimizer {twice} parameters more than once" if twice else ""


def _called(
    factory: OptimizerFactory, parts: Sequence[nn.Module], stepped: Sequence[nn.Parameter]
) -> Optimizer:
    asked = asked_by(factory)
    model = parts[0] if len(parts) == 1 else _Together(parts)
    if asked == MODEL and any(parameter.requires_grad for parameter in model.parameters()):
        return factory(model)
    if asked in (MODEL, NAMED):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        named = [(names.get(id(one), "nothing"), one) for one in stepped]
        return factory(named if asked == NAMED else _Held(dict(named)))
    return factory(stepped)


class _Together(nn.Module):
    """The stages of a rank as one module: each has names of the whole model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parts = tuple(parts)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of all stages; what none of them holds has no parameters."""
        for part in self._parts:
            yield from part.named_modules(*args, **kwargs)


class _Held(nn.Module):
    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name.rpartition(".")[2], parameter)
