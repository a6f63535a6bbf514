"""What a profile calls as emitted scripts do."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autopar.planner.cluster.link import Collective, Manner
from autopar.planner.profile.waits import OF_SCRIPTS
from autopar.training_calls import training_call
from tests.runtime.processes import run_on_ranks

PAYLOAD_BYTES = 4096


def _made(manner: str, name: str) -> tuple[int, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = training_call(Manner(manner), Collective(name), PAYLOAD_BYTES, rank, ranks)()
    return made.nbytes, made.mean().item()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("manner", "collective"), [(manner, one) for manner, own in OF_SCRIPTS.items() for one in own]
)
def test_a_call_moves_its_payload_and_sums_where_it_should(
    manner: Manner, collective: Collective, ranks: int
) -> None:
    sums = collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    part = ranks if collective is Collective.REDUCE_SCATTER else 1
    for found in run_on_ranks(_made, ranks, manner.value, collective.value):
        assert found == (PAYLOAD_BYTES // part, ranks if sums else 1)
