"""What a script says, all decided: the template only lays it out."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.codegen.python_text import Source


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A table of layers that are recomputed in one way."""

    table: str
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptView:
    """The parts of a script from top to bottom; empty text where a plan has no such part."""

    docstring: Source
    model_imports: Source
    functions: Source
    model_source: Source  # its files, and what stands for their text
    settings: Source
    plan: Source
    classes: Source  # opened modules, stages, and a loss that is split
    counting: Source  # the function that counts the targets of a batch
    weighs_terms: bool  # of a loss that adds several means up
    dividing: Source  # the argument that tells what the loss adds to its counts
    weighs_microbatches: bool  # whose loss is one mean, over targets that may be few
    sums_rows: bool  # a loss that is a sum over rows, of several parts
    tables: Source  # data that names those classes
    is_pipelined: bool
    opened: bool
    splits: bool
    parts: Source  # that a rank holds of the model
    split_argument: Source
    shards: bool
    summed: bool
    ties: bool
    scales_loss: bool  # fp16
    kept: Source  # what a checkpoint is made of
    scaling: Source  # of the losses of a pipeline
    clipping: Source
    waits_for_last: Source  # microbatch: a remark that says what does
    prints_forwards: bool  # of the model's classes
    has_dataset: bool
    reading: Source  # the call that yields microbatches
    evaluation: Source  # the call that makes what evaluates the model; empty: nothing does
    plainly: Source  # what one device computes a loss with
    first_step: Source  # the call that compares the first loss
    measures: bool  # by metrics() of the model file
    gathers_rows: bool  # which tensor ranks have read each for itself
    default_optimizer: Source  # what makes the optimizer where the model file makes none
    warms_up: bool  # by a schedule that the model file does not make
    scheduler: Source  # the call that makes the schedule of learning rates; empty: there is none
    has_writing: bool  # layers that write where others read
    has_unread: bool  # parameters that the loss does not depend on
    has_steady: bool  # buffers that each of several microbatches would write
    recomputations: tuple[Recomputation, ...]
    wrapping: Source
    model_arguments: Source
    axis_argument: Source
    axis_value: Source
    loss: Source
    unit: str
    unit_constant: str
