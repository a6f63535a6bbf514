"""Processes whose constructors do not do the same are told so, by the name of a parameter."""

import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from io import StringIO

import numpy as np
import pytest
import torch
from torch import nn

from autopar.runtime.ranks.mesh import start
from autopar.runtime.weights.initial_weights import digest_of, record
from autopar.runtime.weights.loading import load_weights
from tests.runtime.processes import run_on_ranks


def _model(number: float) -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight.data += number
    return nn.Sequential(first, second)


def _seeded_by_the_clock() -> nn.Module:
    torch.manual_seed(time.time_ns())
    return nn.Linear(3, 3)


def _drawn_from_the_system() -> nn.Module:
    model = nn.Linear(3, 3)
    numbers = np.random.default_rng().standard_normal(3)
    model.bias.data.copy_(torch.from_numpy(numbers))
    return model


def _in_full() -> nn.Module:
    model = _drawn_from_the_system()
    model.get_parameter("weight").untyped_storage().resize_(100)
    return model


def _more_in_one() -> nn.Module:
    """Build more in one process, and let it be."""
    if os.environ["RANK"] == "1":
        nn.Linear(3, 3).weight.mean()
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def _of_the_rank() -> nn.Module:
    return _model(float(os.environ["RANK"]))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "1.weight differ": _of_the_rank,
    "bias, weight differ": _seeded_by_the_clock,
    "bias differ": _drawn_from_the_system,
    "bias": _in_full,
}


def _load(factory: Callable[[], nn.Module], axis: str) -> None:
    mesh = start(**{"pipeline": 1, "data": 1, "tensor": 1, axis: 2})
    model, recipe = record(factory, seed=0)
    load_weights([model], recipe, None, mesh)


def _told(factory: Callable[[], nn.Module]) -> str:
    """Return what a rank says when it leaves."""
    page = StringIO()
    with redirect_stderr(page), suppress(SystemExit):
        _load(factory, "data")
    return page.getvalue()


@pytest.mark.parametrize("found", OTHERS)
@pytest.mark.filterwarnings("ignore:the model is built in full")
def test_weights_that_each_process_makes_otherwise_are_refused(found: str) -> None:
    told = "".join(run_on_ranks(_told, 2, OTHERS[found]))
    assert f"build_model makes different weights in each process: {found}" in told
    assert "fix: seed what it draws from" in told


def test_what_one_process_does_beside_its_weights_does_no_harm() -> None:
    run_on_ranks(_load, 2, _more_in_one, "tensor")


def test_the_digest_of_a_large_tensor_covers_some_of_its_elements() -> None:
    large = torch.arange(10_000.0)
    assert digest_of(large) == digest_of(large.clone())
    assert digest_of(large) != digest_of(large + 1)
    assert digest_of(large) != digest_of(large.flip(0))
    assert digest_of(torch.zeros(0, 3)) != digest_of(torch.zeros(0, 4))
