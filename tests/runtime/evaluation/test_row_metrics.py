"""Metrics are summed where ranks can send them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.evaluation.metrics import RowMetrics
from autopar.runtime.ranks.mesh import start


def on_the_cpu(outputs: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    del outputs, batch
    return {"of numpy": torch.from_numpy(torch.ones(3).numpy())}


def test_metrics_of_the_cpu_are_summed_on_the_device() -> None:
    mesh = replace(start(pipeline=1, data=1, tensor=1), device=torch.device("meta"))
    metrics, part = RowMetrics(on_the_cpu, mesh), nn.Linear(1, 1)
    with metrics.watching([part]):
        for _ in range(2):
            part(torch.ones(1, 1))
            metrics.add({}, 1)
    assert metrics.sums["of numpy"].device == mesh.device
