"""Turns a plan into a script. This file has the views: the values that each template prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from autopar.codegen.text.values import Source, identifier, remark


@dataclass(frozen=True, slots=True)
class ScriptSetting:
    """A constant and its meaning."""

    name: str
    value: Source
    meaning: str


def lines(settings: Iterable[ScriptSetting]) -> Source:
    """Return the settings as lines, each an assignment with a comment."""
    return Source(
        "\n".join(f"{identifier(s.name)} = {s.value}  {remark(s.meaning)}" for s in settings)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadView:
    """The script from its docstring to its last class (train.py.j2)."""

    docstring: Source
    model_imports: Source
    functions: Source  # the model file's functions, under the script's names
    settings: Source
    plan: Source
    model_source: Source  # the model's files, and their digest
    classes: Source  # opened modules, stages, and a split loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTables:
    """The constants after the classes, in the script's order; an unneeded one is empty."""

    own_rows: Source  # entries of the batch of which a tensor rank gets only some rows
    classes: Source  # modules, and the printed classes that replace theirs
    splits: Source  # how tensor ranks split parameters
    replicated: Source  # parameters whose gradients tensor ranks add up
    writing: Source  # layers that write to memory that other code reads
    layers: Source  # which layers are gathered alone, compiled or recomputed
    unread: Source  # parameters that the loss does not depend on
    once: Source  # buffers that are written once a step, not in each microbatch
    half_buffers: Source
    stages: Source
    ties: Source  # trainable parameters that several stages share

    @property
    def text(self) -> Source:
        """All tables."""
        values = (getattr(self, one.name) for one in fields(self))
        return Source("\n".join(filter(None, values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildView:
    """The function that builds a rank's modules (build.py.j2)."""

    is_pipelined: bool
    built: str  # the variable that wrap() gets: "model", or "part" in a pipeline
    float8: Source  # the call that lets linear layers multiply in float8, or ""
    compiling: Source  # the call that compiles layers with torch.compile, or ""
    recomputations: tuple[Source, ...]  # the calls that recompute layers, or save on the host
    wrapping: Source
    stage_indices: Source  # the call that returns a rank's stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The loss of a microbatch, and one training step (step.py.j2)."""

    is_pipelined: bool
    model_class: Source
    model_arguments: Source
    axis_argument: Source  # the parameter `tensor` of loss_of(), if tensor ranks split the loss
    axis_value: Source
    loss: Source
    loss_is_given: bool  # the model returns its loss
    counting: Source  # the function that counts a batch's targets
    waits_for_last: Source  # a comment on work that waits for the last microbatch
    scales_loss: bool  # fp16
    whole_gradients: Source  # a comment on gradients as large as on one device; empty without them
    scaling: Source  # the argument that scales a pipeline's gradients
    parts: Source  # the rank's modules
    clipping: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """The function `main` (training.py.j2)."""

    products: str  # the argument of set_float32_matmul_precision; empty for torch's default
    product_units: str  # the dtype in which the GPU then multiplies fp32 matrices
    start: Source
    prints_forwards: bool  # the script has forwards of the model's classes
    has_dataset: bool
    weighing: Source  # a comment about the weights of microbatches
    reading: Source  # the call that yields microbatches
    evaluation: Source  # the call that sets up evaluation; empty without one
    parts: Source  # the rank's modules
    split_argument: Source
    default_optimizer: Source  # the optimizer if the model file has none
    optimizer: Source
    outer: Source  # the call that makes the outer optimizer of local steps; empty without them
    streams: bool  # parts of the model have their outer steps in turn
    scheduler: Source  # the call that creates the learning-rate schedule; empty without one
    plain_model: Source  # the call `PlainModel(…)`: a loss in plain PyTorch
    first_step: Source  # the call that compares the first loss
    scales_loss: bool  # fp16
    seeding: Source  # a comment on which ranks draw their own random numbers
    kept: Source  # what a checkpoint contains
    has_metrics: bool  # the model file has metrics()
    units: Source  # the constant with the samples or tokens of a step
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptView:
    """The parts of a script from top to bottom; parts that a plan does not need are empty."""

    tables: ScriptTables
    head: HeadView
    build: BuildView
    step: StepView
    training: TrainingView
