"""A training with local steps goes on from a checkpoint, with as many replicas or with others."""

from pathlib import Path

import torch
from torch import Tensor

from autopar.runtime.checkpointing.finding import AUTO, find_checkpoint
from autopar.runtime.checkpointing.manifest import Moment
from autopar.runtime.checkpointing.restoring import note_of_replicas, restore
from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.optimizer.outer import OuterOptimizer, average_replicas
from autopar.runtime.ranks.mesh import start
from tests.runtime.checkpointing.written import write_checkpoint
from tests.runtime.processes import run_on_ranks
from tests.runtime.small_training import weight_decay_on_matrices, whole
from tests.runtime.test_combined_axes import build, learn

EVERY = 2


class Training:
    """A rank of a training, with an outer optimizer if there are several replicas."""

    def __init__(
        self, *, shard: int, zero: int, every: int = EVERY, parts: int = 1, on_host: bool = False
    ) -> None:
        self.mesh = start(data=4, shard=shard, sync_every=every)
        self.model = build(self.mesh.tensor)
        wrap(self.model, self.mesh, zero=zero, bucket_bytes=500, units=list(self.model))
        kind = weight_decay_on_matrices
        self.optimizer = build_optimizer([self.model], kind, zero=zero, mesh=self.mesh)
        self.outer = None
        if every:
            self.outer = OuterOptimizer(
                [self.model], self.optimizer, self.mesh, lr=0.7, momentum=0.9,
                parts=parts, delay=int(parts > 1), on_host=on_host,
            )  # fmt: skip

    def train(self, steps: range) -> None:
        for step in steps:
            learn(self.model, step, self.mesh)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.outer is not None:
                self.outer.step_parts(step + 1)

    def weights(self) -> dict[str, Tensor]:
        return whole(self.model.named_parameters())


def _restored(folder: Path, training: Training) -> str | None:
    found = find_checkpoint(folder, AUTO, training.mesh)
    assert found is not None
    restore(found, [training.model], training.optimizer)
    return note_of_replicas(found, training.optimizer)


def _kept(folder: Path, training: Training) -> None:
    moment, mesh = Moment(step=4, rows=16, updates=4), training.mesh
    model, optimizer = training.model, training.optimizer
    assert write_checkpoint(folder, moment, "", [model], optimizer, mesh) is None


def go_on(folder: Path, zero: int, parts: int, kept_after: int) -> tuple[str | None, bool]:
    """Return whether two trainings are equal to the bit: one is interrupted.

    That one goes on with an outer optimizer on the host.
    """
    first = Training(shard=2, zero=zero, every=EVERY * parts, parts=parts)
    first.train(range(kept_after))
    average_replicas(first.optimizer)
    _kept(folder, first)
    first.train(range(kept_after, 12))
    again = Training(shard=2, zero=zero, every=EVERY * parts, parts=parts, on_host=True)
    note = _restored(folder, again)
    again.train(range(kept_after, 12))
    found = again.weights()
    return note, all(torch.equal(one, found[name]) for name, one in first.weights().items())


def test_replicas_go_on_to_the_bit(tmp_path: Path) -> None:
    for zero in (0, 1, 3):
        for note, is_equal in run_on_ranks(go_on, 4, tmp_path / str(zero), zero, 1, 4):
            assert note is None
            assert is_equal


def test_replicas_with_outer_steps_in_parts_go_on_to_the_bit(tmp_path: Path) -> None:
    for kept_after in (4, 7):  # at the end of a round, and while a part is on its way
        for note, is_equal in run_on_ranks(go_on, 4, tmp_path / f"{kept_after}", 1, 2, kept_after):
            assert note is None
            assert is_equal


def go_on_with_others(folder: Path, shard: int, every: int) -> tuple[str | None, float, float]:
    """Return the difference of a state from the mean, and of the weights."""
    first = Training(shard=2, zero=0)
    first.train(range(4))
    _kept(folder, first)
    mean = _moment(first)
    torch.distributed.all_reduce(mean)
    other = Training(shard=shard, zero=0, every=every)
    note = _restored(folder, other)
    weights, expected = other.weights(), first.weights()
    apart = max(float((one - expected[name]).abs().max()) for name, one in weights.items())
    return note, float((_moment(other) - mean / 4).abs().max()), apart


def _moment(training: Training) -> Tensor:
    state = next(iter(training.optimizer.state.values()))
    moment: Tensor = state["exp_avg"].clone()
    return moment


def test_other_numbers_of_replicas_begin_with_the_mean_of_the_states(tmp_path: Path) -> None:
    for shard, every, told in ((1, EVERY, "the plan has 4"), (4, 0, "without momentum")):
        folder = tmp_path / f"{shard}"
        for note, of_state, of_weights in run_on_ranks(go_on_with_others, 4, folder, shard, every):
            assert note is not None
            assert note.startswith("the checkpoint has optimizer states of 2 replicas")
            assert told in note
            assert of_state < 1e-12
            assert of_weights == 0
