import pytest

from autopar.planner.precision import Precision
from autopar.planner.profile.calls import ProbeCall
from autopar.planner.profile.probes import Probe, find_probes, local_strides
from tests.planner.costs.ops.op_factories import pricer

GPT2 = ("gpt2.py",)


def probes(*case: str, degrees: tuple[int, ...] = (1,)) -> tuple[Probe, ...]:
    """Return the probes of a zoo model at 4 rows on a CPU."""
    prices = pricer(*case, batch=4, precision=Precision.FP32, device_name="cpu")
    return find_probes(prices, degrees=degrees)


def test_equal_ops_are_measured_once_and_views_never() -> None:
    found = probes(*GPT2)
    assert len({probe.key for probe in found}) == len(found)
    targets = {probe.key.target for probe in found}
    assert "aten.linear.default" in targets
    assert not targets & {"aten.view.default", "aten.transpose.int"}
    up = next(p for p in found if p.results == ((4, 64, 256),) and "linear" in p.key.target)
    assert up.uses >= 2  # one in each of two blocks


def test_an_operand_lies_in_memory_as_in_training() -> None:
    attention = next(p for p in probes(*GPT2) if "attention" in p.key.target)
    query = attention.operands[0]
    assert query.shape == (4, 4, 64, 16)  # rows, heads, positions, 16 of 64 columns
    assert query.strides == (64 * 192, 16, 192, 1)  # of a matrix with query, key and value


def test_a_part_of_a_tensor_keeps_order_and_gaps_of_the_whole() -> None:
    # Half of the heads: a row of the fused matrix has 3 · 32 columns.
    assert local_strides((4, 4, 64, 16), (64 * 192, 16, 192, 1), (4, 2, 64, 16)) == (
        64 * 96, 16, 96, 1,
    )  # fmt: skip
    assert local_strides((8, 3), (1, 8), (4, 3)) == (1, 4)
    assert local_strides((8, 3), (0, 1), (4, 3)) == (0, 1)


def test_what_a_rank_runs_by_code_of_the_runtime_is_left_to_the_formulas() -> None:
    split = [probe for probe in probes(*GPT2, degrees=(2,)) if probe.split is not None]
    assert split
    assert not any("cross_entropy" in probe.key.target for probe in split)
    assert not any(
        "embedding" in probe.key.target and probe.operands[0].shape[0] == 128 for probe in split
    )


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "t5", "resnet", "vit", "mnist", "intent"]
)
def test_every_op_of_the_zoo_runs_by_itself_whole_and_split(name: str) -> None:
    found = probes(f"{name}.py", degrees=(1, 2))
    for probe in found:
        call = ProbeCall(probe=probe, device="cpu")
        for _ in range(2):
            call.prepare()
            call.keep(call.forward())
            if call.prepare_backward():
                call.backward()
            call.forget()
    assert any(probe.is_differentiable for probe in found)
