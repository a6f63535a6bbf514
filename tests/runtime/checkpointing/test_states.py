"""The numbers that an optimizer keeps are read without asking for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.checkpointing.states import Scalar, scalars
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import Mesh


class Asked(TorchDispatchMode):
    """Counts the numbers that are asked for: on a device the host waits for each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_steps_of_all_parameters_are_read_at_once(mesh: Mesh) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)])
    optimizer = build_optimizer([model], torch.optim.AdamW, zero=0, mesh=mesh)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with Asked() as asked:
        found = scalars([model], optimizer)
    assert asked.count == 0
    assert found == {
        f"state/step/{number}.{kind}": Scalar(value=3.0, dtype="float32")
        for number in range(9)
        for kind in ("weight", "bias")
    }
