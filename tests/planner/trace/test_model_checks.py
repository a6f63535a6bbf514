"""Models that no script could train as they are built, and what is told of them."""

from pathlib import Path

import pytest
import torch

from autopar.planner.errors import InputError
from autopar.planner.trace.model_checks import is_library_file
from tests.planner.trace.model_source import traced

HOOKED = """
def keep_rows(gradient):
    return gradient * torch.tensor([[1.0], [0.0], [1.0], [1.0]])

def build_model():
    model = Stack(nn.Linear(4, 4))
    model[0].weight.{registered}
    return model
"""


@pytest.mark.parametrize(
    "registered",
    ["register_hook(keep_rows)", "register_post_accumulate_grad_hook(keep_rows)"],
)
def test_a_hook_on_the_gradient_of_a_parameter_is_refused(tmp_path: Path, registered: str) -> None:
    with pytest.raises(InputError) as told:
        traced(tmp_path, HOOKED.format(registered=registered))
    assert "the parameter 0.weight has a hook on its gradient (keep_rows)" in str(told.value)
    assert "torch.where(learns, weight, weight.detach())" in str(told.value)


TIED_BY_DATA = """
def build_model():
    model = Stack(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model
"""


def test_two_parameters_in_one_memory_are_refused_in_every_way_to_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lies in the memory of the parameter"):
        traced(tmp_path, TIED_BY_DATA)


def test_packages_beside_torch_belong_to_the_model() -> None:
    packages = Path(torch.__file__).parents[1]
    assert is_library_file(str(packages / "torch" / "functional.py"))
    assert not is_library_file(str(packages / "torchvision" / "models" / "vit.py"))
    assert not is_library_file(str(packages / "torch_geometric" / "nn" / "conv.py"))
