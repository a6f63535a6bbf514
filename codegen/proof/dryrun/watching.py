"""Runs a script as one rank, without computing, and finds its step's peak memory and messages.

Under AUTOPAR_DRYRUN="rank/world" the process group sends nothing and tensors have shapes but no
values, so one rank's step among thousands takes seconds. `python -m
autopar.codegen.proof.dryrun.watching SCRIPT` runs a script to the end of its first step, and prints
the report of that rank.

Sizes that depend on data get the plan's expected values. AUTOPAR_DRYRUN_PICKED maps the number of
entries of a mask to the share that is expected to be true. Other masks count as all true.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from autopar.codegen.proof.dryrun.memory import (
    LiveMemory,
    categories_of,
    cuda_kernels,
    kept_on_host,
)
from autopar.codegen.proof.script_rank import imported, parts_of
from autopar.runtime.data.batches import Batch
from autopar.runtime.data_parallel.wrapping import buckets_of
from autopar.runtime.ranks.transport import HostLink

PICKED = "AUTOPAR_DRYRUN_PICKED"
Entered = TypeVar("Entered")

_ATEN = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def expected_entries(mask: Tensor) -> int:
    """Return how many entries of a mask count as true."""
    shares: Mapping[int, float] = dict(json.loads(os.environ.get(PICKED, "[]")))
    return ceil(mask.numel() * shares.get(mask.numel(), 1.0))


def _nonzero(mode: Any, _op: Any, mask: Tensor) -> Tensor:
    with mode:
        return mask.new_empty((expected_entries(mask), mask.dim()), dtype=torch.int64)


def _masked_select(mode: Any, _op: Any, values: Tensor, mask: Tensor) -> Tensor:
    with mode:
        whole = torch.logical_or(mask, torch.empty_like(values, dtype=torch.bool))
        return values.new_empty(ceil(expected_entries(mask) * whole.numel() / mask.numel()))


def _index(mode: Any, op: Any, values: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    with mode:
        places: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in _MASKS:
                places += index.nonzero().unbind(1)
            else:
                places.append(index)
    made: Tensor = _INDEX(mode, op, values, places)
    return made


def _grouped_mm(
    mode: Any, _op: Any, rows: Tensor, matrices: Tensor, offs: Tensor | None = None,
    *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """Make a result of the right shape; torch infers it for bfloat16 only."""
    groups = () if rows.dim() + matrices.dim() == 5 else (len(rows if offs is None else offs),)
    with mode:
        return rows.new_empty((*groups, rows.shape[-2], matrices.shape[-1]))


_INDEX = fake_impls.op_implementations_dict[_ATEN.index.Tensor]
_SIZED = {
    _ATEN.nonzero.default: _nonzero,
    _ATEN.masked_select.default: _masked_select,
    _ATEN.index.Tensor: _index,
    _ATEN._grouped_mm.default: _grouped_mm,
}


def sizes_from_data() -> AbstractContextManager[Any]:
    """Return a context in which tensors whose sizes depend on data get the expected sizes."""
    return patch.dict(fake_impls.op_implementations_dict, _SIZED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All calls of one collective with one group size and message size."""

    kind: str
    ranks: int
    bytes: int  # of the whole tensor that is gathered, reduced or scattered
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The needs of one rank's step: the peak of allocated bytes, and the collectives."""

    peak_bytes: int
    peak_bytes_by_category: Mapping[str, int]
    host_bytes: int  # at its peak
    collectives: tuple[CollectiveTotal, ...]

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self), indent=2)


_group_named: Any = torch._C._distributed_c10d._resolve_process_group
_REDUCTIONS = ("sum", "avg")
_FUNCTIONAL = {  # kinds by the names of functional collectives
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather_base",
    "reduce_scatter_tensor": "reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


@contextmanager
def recording() -> Iterator[DryRunRecording]:
    """Record memory and collectives of the code inside, whose tensors have shapes but no values."""
    memory = LiveMemory()
    with (
        _watched_host(memory),
        memory.watching_resizes(),
        cuda_kernels(),
        sizes_from_data(),
        FakeTensorMode(allow_non_fake_inputs=True),
        DryRunRecording(memory) as record,
    ):
        yield record


@contextmanager
def _watched_host(memory: LiveMemory) -> Iterator[None]:
    """Count what buckets allocate in host memory, and gradients that fully_shard moves there."""
    allocated, kept = HostLink.empty, FSDPParam.to_sharded_dtensor

    def empty(link: HostLink, elements: int, dtype: torch.dtype) -> Tensor:
        with memory.allocating_on_host():
            return allocated(link, elements, dtype)

    def to_sharded_dtensor(one: FSDPParam, tensor: Tensor) -> DTensor:
        return kept(one, memory.put_on_host(tensor) if one.offload_to_cpu else tensor)

    with (
        patch.object(HostLink, "empty", empty),
        patch.object(FSDPParam, "to_sharded_dtensor", to_sharded_dtensor),
    ):
        yield


class DryRunRecording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records each op's allocations and messages, below autograd."""

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._calls: Counter[tuple[str, int, int]] = Counter()
        self._measures = False

    @contextmanager
    def measured(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Iterator[None]:
        """Measure the peak and the collectives of the code inside."""
        self._measures = True
        with self._memory.measuring(lambda: categories_of(modules, optimizers)):
            yield
        self._measures = False

    @contextmanager
    def second_step(
        self, modules: Sequence[nn.Module], optimizer: Optimizer, given: object = None
    ) -> Iterator[None]:
        """Measure a step as if it were not the first.

        Of the tensors made before the step, only those of modules and optimizer and its arguments
        (`given`) count as device memory.
        """
        for tensor in kept_on_host(modules):
            self._memory.put_on_host(tensor)
        _leave_a_step_behind(modules, optimizer)
        if given is not None:
            tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
            self._memory.leave_out_host(categories_of(modules, [optimizer]), tensors)
        with self.measured(modules, [optimizer]):
            yield

    def report(self) -> Report:
        """Return the peak and the collectives of the measured part."""
        calls = sorted(self._calls.items(), key=lambda call: (call[0][0], -call[0][2]))
        return Report(
            peak_bytes=self._memory.peak_bytes,
            peak_bytes_by_category=dict(self._memory.peak_by_category),
            host_bytes=self._memory.host_peak_bytes,
            collectives=tuple(
                CollectiveTotal(kind=kind, ranks=ranks, bytes=size, count=count)
                for (kind, ranks, size), count in calls
            ),
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op and record it."""
        if DTensor in types:
            return NotImplemented  # the ops on local tensors are dispatched next
        if func is torch.ops.prim.device.default:  # by far the most frequent op
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func.name().startswith("aten::_fused_") and not func._schema.returns:
            return None  # an optimizer's step: there are no values
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and self._measures:
            self._count(func, (args, result))
        place = self._memory.put_on_host if self._is_from_host(args) else self._memory.see
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                place(leaf)
        return result

    def _is_from_host(self, args: tuple[Any, ...]) -> bool:
        """Whether an op's first tensor lies in the host's memory, where its result then is, too."""
        first = next((one for one in tree_leaves(args) if isinstance(one, Tensor)), None)
        return first is not None and self._memory.is_on_host(first)

    def _count(self, func: Any, passed: tuple[Any, ...]) -> None:
        """Record a collective by its arguments and results."""
        name = func.name().rpartition("::")[2].strip("_")
        kind = _FUNCTIONAL.get(name, name)
        leaves = tree_leaves(passed)
        group = next(filter(None, map(_as_group, leaves)), None)
        if group is not None:
            size = max((leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)), default=0)
            self._calls[kind, group.size(), size] += 1


def _leave_a_step_behind(modules: Sequence[nn.Module], optimizer: Optimizer) -> None:
    """Create what a first step would leave: the optimizer's states, and buffers of gradients."""
    for module in modules:
        buckets = buckets_of(module)
        if buckets is not None:
            buckets.attach()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if buckets is not None:
            buckets.finish()
    optimizer.step()
    optimizer.zero_grad()


def _as_group(value: object) -> dist.ProcessGroup | None:
    """Return a collective's group; functional collectives pass its name."""
    if isinstance(value, str) and value not in _REDUCTIONS:
        named: dist.ProcessGroup = _group_named(value)
        return named
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, ValueError):
        return None  # a reduce operator


class _StepRecordedError(Exception):
    """A step has been recorded: the script ends here."""


def report_of(path: Path) -> Report:
    """Run a script's `main` to the end of its first step; report on it as if it were the second."""
    found: list[Report] = []

    def watched(step: FirstStep, record: DryRunRecording) -> None:
        with record.second_step(step.parts, step.optimizer, step.given):
            step.take()
        found.append(record.report())

    run_first_step(path, recording(), watched)
    return found[0]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a script, before it is taken."""

    take: Callable[[], Any]
    parts: Sequence[nn.Module]
    optimizer: Optimizer
    given: tuple[Any, ...]  # further arguments of train_step


def run_first_step(
    path: Path, watching: AbstractContextManager[Entered], run: Callable[[FirstStep, Entered], None]
) -> None:
    """Run a script's `main` up to its first step, which is passed to `run`.

    `watching` is entered just before weights are loaded. Until then, the modules are on the meta
    device, and have no memory.
    """
    script: Any = imported(path)
    load_weights, train_step = script.load_weights, script.train_step
    entered: list[Entered] = []
    with ExitStack() as stack:

        def load(*args: Any, **kwargs: Any) -> None:
            entered.append(stack.enter_context(watching))
            load_weights(*args, **kwargs)

        def step(model: Any, optimizer: Optimizer, *args: Any) -> None:
            taken = partial(train_step, model, optimizer, *args)
            run(FirstStep(taken, parts_of(model), optimizer, args), entered[0])
            raise _StepRecordedError

        script.load_weights, script.train_step = load, step
        script.new_batch = _with_values(script.new_batch)
        with suppress(_StepRecordedError):
            script.main([])


def _with_values(new_batch: Callable[..., Batch]) -> Callable[..., Batch]:
    """Return a `new_batch` that makes batches with values, because the model file may read them."""

    def made(*args: Any, **kwargs: Any) -> Batch:
        with _disable_current_modes():
            return new_batch(*args, **kwargs)

    return made


if __name__ == "__main__":
    print(report_of(Path(sys.argv[1])).to_json())
