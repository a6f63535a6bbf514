"""A layer that draws otherwise where it runs again is found, on a device that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.pretended_device import device_draw_faults
from autopar.planner.costs.prediction import Recompute
from autopar.planner.plan.declared.constraints import RecomputePin
from tests.codegen.kinds import KINDS
from tests.codegen.plans import pinned_plan

pytestmark = pytest.mark.usefixtures("forked_python")
# torch's own, which keeps the generators of devices of positional tensors alone
BY_KEYWORD = """again = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        layer.forward = partial(lambda run, x: again(lambda y: run(y), y=x), layer.forward)"""


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_checkpoint_by_keyword_is_found_and_recompute_is_right(
    is_edited: bool, tmp_path: Path
) -> None:
    modes = (RecomputePin(modules="h.*", mode=Recompute.SELECTIVE),)
    plan = pinned_plan("gpt2.py", ("layers=2", "seq_len=32"), recompute=modes, **KINDS["tp"])
    path = write_script(plan, tmp_path)
    text, call = path.read_text(encoding="utf-8"), 'recompute(layer, "selective")'
    assert call in text
    path.write_text(text.replace(call, BY_KEYWORD) if is_edited else text, encoding="utf-8")
    faults = device_draw_faults(path, [0], 2)
    assert bool(faults) == is_edited
    assert all("draws another mask when it runs again" in fault for fault in faults)
