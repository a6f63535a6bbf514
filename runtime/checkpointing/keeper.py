"""Resumes a training from its last checkpoint, writes new checkpoints, and exports the weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopar.runtime.checkpointing.claim import folder_of, opened
from autopar.runtime.checkpointing.export import Exporting, export, exporting
from autopar.runtime.checkpointing.finding import Checkpoint, remove_old_checkpoints
from autopar.runtime.checkpointing.manifest import ExportedWeight, Moment
from autopar.runtime.checkpointing.model_files import destination
from autopar.runtime.checkpointing.owners import Owners
from autopar.runtime.checkpointing.progress import (
    GO_ON,
    Planned,
    Progress,
    broken_in_words,
    broken_of,
)
from autopar.runtime.checkpointing.restoring import (
    CheckpointSaving,
    Evaluations,
    SavedCheckpoint,
    go_back,
    note_of_replicas,
    restore,
    restore_random_states,
    step_again,
)
from autopar.runtime.checkpointing.signals import PREEMPTED, Garbage, StepProfile, StopSignals
from autopar.runtime.checkpointing.states import local_parts
from autopar.runtime.checkpointing.watch import Watch
from autopar.runtime.checkpointing.writing import exported_of, plan_digest, said, snapshot
from autopar.runtime.data.epochs import epochs_of
from autopar.runtime.evaluation.evaluating import Evaluated, evaluates_after
from autopar.runtime.optimizer.gradients import LossScale
from autopar.runtime.optimizer.outer import average_replicas
from autopar.runtime.ranks.leaving import give_up, refuse
from autopar.runtime.ranks.locations import Location
from autopar.runtime.ranks.mesh import Mesh, stop
from autopar.runtime.ranks.metrics import Curves, Event, Metrics
from autopar.runtime.ranks.options import check_same_options, in_rounds
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.transport import every_rank
from autopar.runtime.ranks.user_code import note_device
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.loading import WeightsOrigin

__all__ = ["Keeper"]  # for scripts


class Keeper:
    """The object through which a script saves and resumes its training.

    `step` and `rows` are the position at which this run begins: 0, or that of the checkpoint.
    `steps` is the last step of the training; --epochs is converted to steps.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        mesh: Mesh,
        dataset: Any = None,
        *,
        rows_per_step: int,
        model: str,
    ) -> None:
        check_same_options(options, mesh)
        self._mesh, self._options, self._model = mesh, options, model
        for note in in_rounds(options, mesh.sync_every):
            self._mesh.say(note)
        self._epochs = epochs_of(dataset, options, rows_per_step)
        self._folder = folder_of(options)
        self._place = destination(options.export, mesh, beside=self._folder)
        self._exporting: Exporting | None = None
        open_folder = opened(self._folder, options, mesh, self._steps_from)
        self._found, self._claim = open_folder.found, open_folder.claim
        moment = self._found.manifest.moment if self._found else Moment(step=0, rows=0, updates=0)
        self.step, self.rows = moment.step, moment.rows
        self._updates, self._kept_step = moment.updates, moment.step
        self.steps = self._last_step = self._steps_from(moment)
        self._loss_scale: LossScale | None = None
        self._parts: Sequence[nn.Module] = ()
        self._optimizer: Optimizer  # this and the recipe are set by `restore`
        self._recipe: Recipe
        self._rate: Any = None
        self._signals, self._stops, self._is_due = StopSignals(mesh), False, False
        self._owners, self._garbage = Owners(mesh), Garbage()
        self._exported: Mapping[str, ExportedWeight] = {}
        self._saving, self._begun_at = CheckpointSaving(mesh), time.perf_counter()
        self._watch = Watch(mesh, options.timeout)
        curves = Curves(options.tensorboard, mesh, begun=self.step, beside=self._folder)
        self._metrics = Metrics(options.metrics, mesh, curves, beside=self._folder)
        self._evaluations = Evaluations(options, mesh, self._metrics)
        self._profile = StepProfile(options, mesh, self._metrics)
        self._progress: Progress | None = None

    def _steps_from(self, moment: Moment) -> int:
        """Return the last step of a training that resumes from a moment."""
        if self._options.epochs is None:
            return int(self._options.steps)
        return moment.step + self._epochs.steps_until(self._options.epochs, moment.rows)

    def restore(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer,
        recipe: Recipe,
        scheduler: LRScheduler | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """Register a training that is about to begin, and restore its checkpoint."""
        self._parts, self._optimizer, self._loss_scale = parts, optimizer, loss_scale
        self._recipe = recipe
        self._exporting = exporting(self._place, recipe, self._mesh)
        if self._found is not None:
            self._go_on(self._found, optimizer, scheduler)
        optimizer.register_step_pre_hook(self._note_rate)
        optimizer.register_step_post_hook(self._count)
        self._found = None
        self._refuse_no_numbers()
        self._metrics.add(event=Event.STARTED, step=self.step, steps=self.steps)
        if self._folder is not None:
            self._signals.listen()
        self._watch.begin(self.step, self._note_stop)
        self._profile.begin(self.step + 1, parts)
        self._garbage.begin(self.step)

    def progress(self, amount: int, unit: str, planned: Planned) -> Progress:
        """Return the progress printer. A step trains on `amount` tokens or samples (`unit`)."""
        note_device(planned[0], self._mesh)
        self._progress = Progress(
            self._options,
            self._mesh,
            self._parts,
            self._learning_rate,
            self._metrics,
            amount=amount,
            unit=unit,
            planned=planned,
            begun=self.step,
            scales_loss=self._loss_scale is not None,
            before_stopping=self._finish,
        )
        return self._progress

    def evaluated(self, step: int, found: Evaluated) -> None:
        """Print the result of an evaluation after a step; `after` saves the best weights."""
        assert self._progress is not None
        self._progress.leave_out(found.seconds)
        self._evaluations.note(step, found)
        if self.stops_early:
            self._last_step = step

    @property
    def stops_early(self) -> bool:
        """Whether the last --early-stop evaluations brought no improvement."""
        return self._evaluations.are_over

    def after(self, step: int) -> None:
        """Finish a step: show progress, save a checkpoint if one is due, exit after a signal."""
        self._profile.end(step)
        self._garbage.after(step)
        self._keep(step)
        self._profile.begin(step + 1, self._parts)

    def _keep(self, step: int) -> None:
        """Show progress; write a checkpoint if one is due; exit if a signal asks for it."""
        self._watch.note(step, evaluates_next=evaluates_after(step + 1, self._options))
        if self._progress is not None and step != self._last_step:
            self._progress.show(step)
        if self._folder is None:
            return
        is_last = step == self._last_step
        minutes = self._options.checkpoint_minutes
        seconds = time.perf_counter() - self._begun_at
        are_minutes_over = minutes is not None and seconds > 60 * minutes
        answer = self._signals.ask(
            step, is_writing=self._saving.is_writing, is_due=are_minutes_over
        )
        is_alike = is_last or self._mesh.is_alike(step)  # until then signals and checkpoints wait
        if answer.stops and not (self._stops or is_alike):
            every = self._mesh.sync_every
            self._mesh.say(f"stops after step {step + -step % every:,}, the next outer step")
        self._stops |= answer.stops
        self._is_due |= answer.is_due or step % self._options.checkpoint_every == 0
        leaves = self._stops and is_alike and not is_last
        is_due = self._is_due and is_alike
        is_due = is_due or leaves or is_last or self._evaluations.best_step == step
        with self._watch.patient():
            if answer.is_written or is_due:
                self._finish()
            if is_due:
                self._is_due = False
                self._write(self._folder, step, at_once=leaves or is_last)
        if leaves:
            self._leave(step, is_kept=self._kept_step == step)

    def export(self) -> None:
        """Write the trained weights of the whole model."""
        self._watch.end()
        self._garbage.end()
        self._signals.restore_handlers()
        if self._exporting is not None and (broken := self._broken()) is not None:
            self._refuse_broken(self._last_step, broken)
            self._exporting = None
        self._go_back_to_best()
        begun = WeightsOrigin(self._recipe, self._options.weights)
        export(self._parts, self._optimizer, begun, self._exporting, self._mesh)
        self._give_back()
        self._metrics.add(event=Event.FINISHED, step=self._last_step)

    def _go_back_to_best(self) -> None:
        """Restore the weights of the best evaluation if --export-best asks for them."""
        best = self._evaluations.best_step
        if not self._options.export_best or best in (None, self._last_step):
            return
        assert best is not None
        assert self._folder is not None
        go_back(self._folder, best, self._parts, self._optimizer, self._mesh)

    def _go_on(
        self, found: Checkpoint, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> None:
        moment, origin, parts = found.manifest.moment, found.manifest.origin, self._parts
        notes = restore(found, parts, optimizer), note_of_replicas(found, optimizer)
        for note in filter(None, notes):
            self._mesh.say(f"note: {note}")
        if self._loss_scale is not None and moment.loss_scale is not None:
            self._loss_scale.go_on(moment.loss_scale, moment.calm_steps)
        if scheduler is not None:
            step_again(scheduler, moment.updates)
        self._evaluations.go_on(found.folder.parent, moment.step)
        owned = self._owners.of(local_parts(parts, optimizer))
        if origin.plan == plan_digest(owned, self._mesh):
            restore_random_states(found, self._mesh)
        else:  # another plan: draw other numbers than at the start
            mesh = self._mesh
            places = (mesh.data.rank, mesh.pipeline.rank)
            torch.manual_seed(mixed_seed(self._options.seed, moment.step, *places))
        self._mesh.say(f"goes on after step {moment.step:,} from {found.folder}")
        if origin.model != self._model:
            self._mesh.say("note: the checkpoint is of another model file, but its tensors fit")
        if moment.step >= self.steps:
            self._mesh.say(f"all {self.steps:,} steps (--steps or --epochs) are done already")

    def _write(self, folder: Location, step: int, *, at_once: bool) -> None:
        """Write a checkpoint: at once, or in the background."""
        average_replicas(self._optimizer)
        self._stop_if_lost(folder, step)
        if (broken := self._broken()) is not None:
            self._refuse_broken(step, broken)
            return
        self._begun_at = begun = time.perf_counter()
        scale = self._loss_scale
        moment = Moment(
            step=step,
            rows=self._epochs.position(self.rows, step - self.step),
            updates=self._updates,
            loss_scale=None if scale is None else scale.value,
            calm_steps=0 if scale is None else scale.calm_steps,
            evaluation=self._evaluations.loss_of(step),
        )
        self._exported = self._exported or exported_of(self._parts, self._recipe.dtypes, self._mesh)
        taken = snapshot(
            folder,
            moment,
            self._model,
            self._parts,
            self._optimizer,
            self._owners,
            exported=self._exported,
        )
        if isinstance(taken, str):
            self._tell_failure(step, taken)
        elif at_once:
            self._tell_kept(self._saving.write_at_once(taken, begun))
        else:
            self._saving.begin(taken, begun)

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and put it in place."""
        if self._saving.is_under_way:
            self._tell_kept(self._saving.finish())

    def _tell_kept(self, saved: SavedCheckpoint) -> None:
        """Print that a checkpoint was saved, and remove old ones; or print why it was not saved."""
        if saved.failure is not None:
            self._tell_failure(saved.step, saved.failure)
            return
        self._kept_step, folder = saved.step, self._folder
        assert folder is not None
        self._metrics.add(
            event=Event.KEPT,
            step=saved.step,
            folder=str(folder),
            seconds=round(saved.seconds, 3),
            waited_seconds=round(saved.waited_seconds, 3),
        )
        waited = f"{saved.seconds:,.1f} s, of which the training waited {saved.waited_seconds:,.1f}"
        self._mesh.say(f"kept step {saved.step:,} in {folder} ({waited})")
        try:
            if self._mesh.rank == 0:
                remove_old_checkpoints(folder, self._options.keep, self._options.keep_every)
        except OSError as error:
            self._mesh.say(f"note: older checkpoints could not be removed ({said(error)})")

    def _tell_failure(self, step: int, failure: str) -> None:
        last = f"step {self._kept_step:,}" if self._kept_step else "none"
        self._mesh.say(f"note: step {step:,} could not be kept ({failure}); the last one is {last}")

    def _stop_if_lost(self, folder: Location, step: int) -> None:
        """Exit if another training took the folder while this one was suspended."""
        is_lost = self._claim is not None and self._claim.is_lost
        if every_rank(is_lost, self._mesh.world)[0]:
            found = f"another training has taken {folder} while this one stood still"
            self._metrics.add(event=Event.STOPPED, step=step, why=found)
            give_up(found, fix="let one of them end, or give it a folder of its own: --checkpoint")

    def _give_back(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def _broken(self) -> str | None:
        """Return a message that names non-finite parameters on any rank, or None."""
        ranks = every_rank(broken_of(self._parts), self._mesh.world)
        return broken_in_words(ranks) if any(one.count for one in ranks) else None

    def _refuse_no_numbers(self) -> None:
        """Exit if parameters are not finite before the first step."""
        if self._mesh.is_dry_run or (broken := self._broken()) is None:
            return
        weights = self._options.weights
        origin = "build_model() makes them so" if weights is None else f"from {weights.files}"
        if self._options.on_nan == GO_ON:
            self._mesh.say(f"note: {broken} before the first step ({origin})")
            return
        refuse(
            f"{broken} before the first step ({origin})",
            fix="give weights without nan and infinity; --on-nan go-on trains with them",
        )

    def _refuse_broken(self, step: int, broken: str) -> None:
        """Print that weights are not finite and so not saved; exit unless --on-nan go-on is set."""
        found = f"{broken} after step {step:,}, and are not kept"
        if self._options.on_nan == GO_ON:
            self._mesh.say(f"note: {found}")
            return
        self._metrics.add(event=Event.STOPPED, step=step, why=found)
        give_up(
            found,
            fix="a lower --lr, or a scheduler that warms up; --resume auto goes on from the last "
            "checkpoint; --on-nan go-on trains on",
        )

    def _leave(self, step: int, *, is_kept: bool) -> NoReturn:
        """Exit on all ranks after a signal."""
        self._watch.end()
        self._garbage.end()
        self._signals.ignore()
        if is_kept:
            self._metrics.add(event=Event.PREEMPTED, step=step)
        self._give_back()
        stop(self._mesh)
        if is_kept:
            self._mesh.say(f"stopped by a signal after step {step:,}; --resume auto goes on")
        raise SystemExit(PREEMPTED if is_kept else 1)

    def _note_stop(self, step: int, why: str) -> None:
        self._metrics.add(event=Event.STOPPED, step=step, why=why)

    def _count(self, *_: Any) -> None:
        self._updates += 1

    def _note_rate(self, optimizer: Optimizer, *_: Any) -> None:
        """Remember the learning rate of this step, before a scheduler sets the next one."""
        self._rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None

    def _learning_rate(self) -> float | None:
        """Return the learning rate of the first parameter group in the last step."""
        return None if self._rate is None else float(self._rate)
