"""Makes small measurements."""

from __future__ import annotations

from autopar.planner.cluster.cluster import Backend, Collective, MeasuredCollective
from autopar.planner.costs.ops.measurements import (
    HostTimes,
    Operand,
    OpKey,
    Timing,
)
from autopar.planner.precision import Precision
from autopar.planner.profile.measured import MeasuredFile, MeasuredHost, MeasuredNet, MeasuredOp

TIMES = HostTimes(
    forward_seconds=2e-6,
    backward_seconds=3e-6,
    action_seconds=2e-5,
    step_seconds=6e-5,
    optimizer_tensor_seconds=4e-6,
    optimizer_element_seconds=1e-9,
)


def op(seconds: float = 1e-3, *, torch: str = "2.13.0+cpu", rows: int = 8) -> MeasuredOp:
    """Return a measured linear layer."""
    key = OpKey(
        device="cpu",
        target="aten.linear.default",
        operands=(
            Operand(shape=(rows, 16), dtype="model", requires_grad=True),
            Operand(shape=(4, 16), dtype="model", requires_grad=True),
            Operand(shape=(), dtype="int64", requires_grad=False),
        ),
        arguments=(("bias", "None"), ("mode", "'a \"quoted\"\\n word'")),
        precision=Precision.FP32,
    )
    timing = Timing(forward_seconds=seconds, backward_seconds=2 * seconds)
    return MeasuredOp(key=key, timing=timing, samples=9, torch=torch)


def host(*, threads: int = 1, torch: str = "2.13.0+cpu") -> MeasuredHost:
    """Return a measured host."""
    return MeasuredHost(device="cpu", threads=threads, torch=torch, times=TIMES)


def net() -> MeasuredNet:
    """Return a measured link of two ranks: an all-reduce of 1 KB takes 1 ms, of 1 MB 3 ms."""
    collective = MeasuredCollective(
        collective=Collective.ALL_REDUCE,
        ranks=2,
        alpha_seconds=5e-4,
        bytes_per_second=5e8,
        points=((1_000, 1e-3), (1_000_000, 3e-3)),
    )
    return MeasuredNet(
        device="cpu",
        backend=Backend.GLOO,
        ranks=2,
        torch="2.13.0+cpu",
        alpha_seconds=1e-4,
        bytes_per_second=2e9,
        collectives=(collective,),
    )


def everything() -> MeasuredFile:
    """Return measurements of each kind."""
    return MeasuredFile(ops=(op(),), hosts=(host(),), nets=(net(),))
