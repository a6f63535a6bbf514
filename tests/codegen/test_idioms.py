"""Each of many everyday idioms trains as the loop of one device, or is refused, or told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cells import cells
from tests.codegen.idioms.outcomes import WAYS, ExitReason
from tests.codegen.idioms.runs import ByScript, Refusal, by_script, plain, written
from tests.codegen.idioms.table import IDIOMS

FP32 = 1e-5
CELLS = [(name, way) for name in IDIOMS for way in WAYS]
TURNS = [(name, WAYS[number % len(WAYS)]) for number, name in enumerate(IDIOMS)]
# Each idiom that is refused or told of, and every fourteenth of the others: each in one way.
STAND = {
    (name, way)
    for number, (name, way) in enumerate(TURNS)
    if number % 14 == 0 or IDIOMS[name].outcome(way).verdict is not ExitReason.EQUAL
}


def test_there_are_at_least_sixty_idioms() -> None:
    assert len(IDIOMS) >= 60


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idioms")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), cells(CELLS, STAND))
def test_an_idiom_trains_as_on_one_device_or_is_refused_or_told(
    name: str, way: str, folder: Path
) -> None:
    one = IDIOMS[name]
    expected = one.outcome(way)
    path = written(one, folder)
    found = by_script(one, path, way, folder)
    if expected.verdict is ExitReason.REFUSED:
        assert isinstance(found, Refusal)
        assert expected.message in " ".join(found.message.split())
        return
    assert isinstance(found, ByScript), found
    if expected.verdict is ExitReason.TOLD:
        assert expected.message in found.notes
        return
    alone, own = plain(path, one.options), found.trained
    if one.compares_losses:
        assert own.losses == pytest.approx(alone.losses, abs=FP32, rel=0.0)
    assert own.evaluated == pytest.approx(alone.evaluated, abs=FP32, rel=0.0)
    for name, value in own.weights.items() if one.compares_weights else ():
        torch.testing.assert_close(value, alone.weights[name], atol=FP32, rtol=0.0, msg=name)
