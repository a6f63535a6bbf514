"""The decided contents of a script, which the template lays out."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.codegen.text.values import Source


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A table of layers with one recompute mode."""

    table: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptView:
    """The parts of a script from top to bottom; empty text for parts that a plan does not have."""

    docstring: Source
    model_imports: Source
    functions: Source
    model_source: Source  # the model's files, and their digest
    settings: Source
    plan: Source
    has_images: bool  # that convolutions read in channels_last order
    classes: Source  # opened modules, stages, and a split loss
    counting: Source  # the function that counts a batch's targets
    weighs_terms: bool  # for a loss that adds several means
    dividing: Source  # the argument for what the loss divides by
    weighs_microbatches: bool  # for a loss that is one mean over counted targets
    sums_rows: bool  # for a loss that is a sum over rows, with several parts
    tables: Source  # data that refers to those classes
    is_pipelined: bool
    opened: bool
    splits: bool
    parts: Source  # the rank's modules
    split_argument: Source
    shards: bool
    summed: bool
    ties: bool
    scales_loss: bool  # fp16
    products: str  # how products of fp32 are rounded; empty for torch's default
    kept: Source  # what a checkpoint contains
    scaling: Source  # of a pipeline's losses
    clipping: Source
    waits_for_last: Source  # a comment on what waits for the last microbatch
    prints_forwards: bool  # of the model's classes
    has_dataset: bool
    reading: Source  # the call that yields microbatches
    evaluation: Source  # the call that sets up evaluation; empty without one
    plainly: Source  # the call `Plainly(…)`: a loss in plain PyTorch
    first_step: Source  # the call that compares the first loss
    measures: bool  # with metrics() of the model file
    gathers_rows: bool  # which tensor ranks have read separately
    default_optimizer: Source  # the optimizer if the model file has none
    warms_up: bool  # with a schedule that is not the model file's
    scheduler: Source  # the call that creates the learning-rate schedule; empty without one
    has_writing: bool  # layers that write to memory that others read
    has_unread: bool  # parameters that the loss does not depend on
    has_steady: bool  # buffers that are written once a step, not in each microbatch
    compiles: bool  # layers by torch.compile
    recomputations: tuple[Recomputation, ...]
    wrapping: Source
    model_arguments: Source
    axis_argument: Source
    axis_value: Source
    loss: Source
    unit: str
    unit_constant: str
