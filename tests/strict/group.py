"""A process group over gloo that is as strict as nccl, for scripts that run on CPU processes.

It refuses what nccl refuses, offers the mean that gloo lacks, and runs the operations of each
communicator one after another in a thread, as nccl does on a stream. A send ends when it has been
received. What an operation gives is seen after `wait()`, and not a number before. Every operation
is noted in a log that `tests/strict/replay.py` replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import _disable_current_modes

from tests.strict.log import Communicator, Log
from tests.strict.refusals import RefusedError, refuse
from tests.strict.work import Move, Stream, Work, copied

NAME = "strict"
_DATA, _TOLD = 0, 1  # tags of gloo: a tensor, and that it has come


def register(log: Log, *, device_type: str = "cpu", seconds: float = 60.0) -> None:
    """Offer the backend; each group that is made notes in the log what it is told to do.

    A rank that waits for longer than `seconds` for an operation fails.
    """

    def made(options: Any, _: Any) -> StrictGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timedelta(seconds=seconds)
        )
        communicator = Communicator(name=options.group_id, ranks=ranks)
        return StrictGroup(communicator, gloo, log, device_type=device_type)

    dist.Backend.register_backend(NAME, made, extended_api=True, devices=[device_type])
    batches_as_one()
    never_recorded()


def batches_as_one() -> None:
    """Have batch_isend_irecv run as one operation: torch asks groups written in Python for none."""
    issue = dist.batch_isend_irecv
    if hasattr(issue, "is_as_one"):
        return

    def as_one(operations: list[dist.P2POp]) -> Any:
        group = operations[0].group
        if not isinstance(group, StrictGroup):
            return issue(operations)
        return group.batch(lambda: issue(operations))

    as_one.is_as_one = True  # type: ignore[attr-defined]
    vars(dist)["batch_isend_irecv"] = as_one


def never_recorded() -> None:
    """Have torch (from 2.15 on) record no groups written in Python: it fails to."""
    module, name = vars(dist.distributed_c10d), "_maybe_attach_flight_recorder"
    record = module.get(name)
    if record is None or hasattr(record, "is_of_others"):
        return

    def of_others(group: Any, *given: Any) -> None:
        if not isinstance(group, StrictGroup):
            record(group, *given)

    of_others.is_of_others = True  # type: ignore[attr-defined]
    module[name] = of_others


class StrictGroup(dist.ProcessGroup):
    """A communicator of some ranks, and the thread that runs its operations in turn."""

    def __init__(
        self, communicator: Communicator, gloo: Any, log: Log, *, device_type: str
    ) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self.communicator, self._gloo, self._log = communicator, gloo, log
        self._device_type = device_type
        self._batch: list[Work] | None = None
        self._stream = Stream()

    @property
    def group_name(self) -> GroupName:
        """Return the name that functional collectives find it by."""
        return GroupName(self.communicator.name)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device_type)]

    def _get_backend(self, _: torch.device) -> Any:
        return self._gloo

    def getBackendName(self) -> str:  # noqa: N802  as torch calls it
        """Return what it was registered as."""
        return NAME

    def shutdown(self) -> None:
        """End the thread, once what is under way has ended."""
        self._stream.end()

    abort = shutdown

    def batch(self, issue: Callable[[], Iterable[Any]]) -> list[Any]:
        """Run what is issued as one operation."""
        self._batch = []
        try:
            with self._log.batched():
                works = list(issue())
            self._stream.put(self._batch)
        finally:
            self._batch = None
        return works

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce tensors in place."""
        opts = opts or dist.AllreduceOptions()

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            for one in copies:
                self._reduce(one, opts.reduceOp)
            return copies

        return self._collective("all_reduce", tensors, tensors, act)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce tensors in place on one rank; what the others have then is anything."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        """Give all ranks what one has."""

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            self._gloo.broadcast(list(copies), opts).wait()
            return copies

        return self._collective("broadcast", tensors, tensors, act)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Work:
        """Lay what all ranks have one behind the other."""
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], _: Any = None
    ) -> Work:
        """Do so with several tensors."""

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            made = [torch.empty_like(one) for one in outputs]
            for whole, mine in zip(made, copies, strict=True):
                self._gloo._allgather_base(whole, mine).wait()
            return made

        return self._collective("all_gather", inputs, outputs, act)

    def allgather(  # type: ignore[override]
        self,
        outputs: list[list[Tensor]],
        inputs: list[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> Work:
        """Gather tensors of equal shapes in a list."""
        (every,) = outputs

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            made = [torch.empty_like(one) for one in every]
            self._gloo.allgather([made], list(copies)).wait()
            return made

        return self._collective("all_gather", inputs, every, act)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather tensors in a list of one rank; nccl's others send theirs as messages."""
        every = [one for several in outputs for one in several]

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            made = [[torch.empty_like(one) for one in several] for several in outputs]
            self._gloo.gather(made, list(copies), opts).wait()
            return [one for several in made for one in several]

        return self._collective("gather", inputs, every, act)

    def reduce_scatter_single(self, output: Tensor, every: Tensor, opts: Any = None) -> Work:
        """Give each rank its part of the reduced tensor."""
        return self.reduce_scatter_single_coalesced([output], [every], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Do so with several tensors."""

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            made = []
            for whole, mine in zip(map(copied, copies), outputs, strict=True):
                self._reduce(whole, opts.reduceOp)
                made.append(whole.view(self.size(), -1)[self.rank()].view(mine.shape))
            return made

        return self._collective("reduce_scatter", inputs, outputs, act)

    def all_to_all_single(
        self,
        output: Tensor,
        mine: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        _: Any = None,
    ) -> Work:
        """Send each rank a piece."""

        def act(copies: Sequence[Tensor]) -> Sequence[Tensor]:
            made = torch.empty_like(output)
            self._gloo.alltoall_base(made, copies[0], output_sizes, input_sizes).wait()
            return [made]

        return self._collective("all_to_all", [mine], [output], act)

    def barrier(self, opts: Any = None) -> Work:  # noqa: ARG002
        """Let all ranks come here; nccl's is an all-reduce, for which the host waits."""
        work = self.allreduce([torch.ones(1, device=self._device_type)])
        work.wait()
        return work

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Send a tensor; the peer has received it when that has ended."""

        def move(copies: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
            told = self._gloo.recv([torch.empty(1)], peer, _TOLD)
            data = self._gloo.send(list(copies), peer, _DATA)

            def finish() -> Sequence[Tensor]:
                data.wait()
                told.wait()
                return ()

            return finish

        return self._message("send", tensors, [], move, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Receive a tensor."""

        def move(_: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
            made = [torch.empty_like(one) for one in tensors]
            data = self._gloo.recv(made, peer, _DATA)

            def finish() -> Sequence[Tensor]:
                data.wait()
                self._gloo.send([torch.ones(1)], peer, _TOLD).wait()
                return made

            return finish

        return self._message("recv", [], tensors, move, peer, tag)

    def _collective(
        self,
        op: str,
        sent: Sequence[Tensor],
        filled: Sequence[Tensor],
        act: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> Work:
        return self._issue(op, sent, filled, lambda copies: lambda: act(copies))

    def _message(
        self,
        op: str,
        sent: Sequence[Tensor],
        filled: Sequence[Tensor],
        move: Move,
        peer: int,
        tag: int,
    ) -> Work:
        if tag:
            raise RefusedError(f"{op}: nccl has no tags, and receives in order")
        return self._issue(op, sent, filled, move, self.communicator.ranks[peer])

    def _issue(
        self,
        op: str,
        sent: Sequence[Tensor],
        filled: Sequence[Tensor],
        move: Move,
        peer: int | None = None,
    ) -> Work:
        for one in (*sent, *filled):
            refuse(op, one, self._device_type)
        with torch.no_grad(), _disable_current_modes():
            work = Work(op, sent, filled, move).noted(self._log, self.communicator, peer)
        if self._batch is None:
            self._stream.put([work])
        else:
            self._batch.append(work)
        return work

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        """Reduce a tensor in place; a mean is that of nccl, whose addends are divided first."""
        if operation == dist.ReduceOp.AVG:
            tensor.mul_(1 / self.size())
            operation = dist.ReduceOp.SUM
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._gloo.allreduce([tensor], options).wait()
