"""Turns a plan into the classes that a script must define: opened modules, stages, loss, counts."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.codegen.forward.reading.imported import Imported
from autopar.codegen.forward.reading.modules import Modules
from autopar.planner.extent import Extent
from autopar.planner.layouts import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedClass:
    """A subclass of one of the model's classes, and the modules that take it.

    `source` calls the class as `base` has it. A class with `uses_axis` has an attribute `tensor`,
    the tensor axis of the mesh, which the script sets.
    """

    name: str
    base: Imported
    instances: tuple[str, ...]
    source: str
    uses_axis: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that one stage gives to the next; its shape is the whole one, before any split."""

    name: str
    shape: tuple[Extent, ...]
    dtype: str
    layout: Layout
    has_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The root's subclass for one pipeline stage (or for the whole model, where there is one).

    Its forward takes `takes` by position and the batch by keyword, and returns `gives`; the last
    one returns what the model returns, or the loss itself where `returns_loss`: then it shows the
    outputs to evaluations that have metrics, all but what is `absent`. `modules` are the modules
    that it calls or reads; the script drops the others. `bounds` are attributes that the script
    sets: stages of one form share one class and differ in these numbers. `crossing` is the source
    of a function that tells the shapes of what it gives, where these vary.
    """

    cls: OpenedClass
    takes: tuple[Crossing, ...]
    gives: tuple[Crossing, ...]
    returns_loss: bool
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    bounds: tuple[tuple[str, int], ...] = ()
    crossing: str = ""
    absent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The source that a plan needs beside the user's own.

    `stages` is empty where the root is called as it is. `loss` is the source of a function
    `split_loss(outputs, batch, tensor)` where the loss must be split, None where the user's own
    (or the model's) is right; `metrics` is that of `whole_metrics(outputs, batch, tensor)`, where
    ranks have shares of the outputs, and `absent` are parts of the outputs that no metric can be
    made of, for the code here does not make them. `valid_targets` is the source of a function of
    the batch that counts the targets in the mean of the loss, None where every row counts alike;
    `weighs_terms` where these are several means, and the code here multiplies each by its own
    weight. `divisor` is the source of a function of such counts where the loss divides by what it
    makes of them (at least one, say). `imports` are lines.
    `inlined` are the calls of modules whose code stands in their caller's: nothing calls them.
    `functions` are those of the model's files that the code here calls. `own_rows` are the keys of
    the batch of which a tensor rank is given its rows alone; `splits_rows` where tensor ranks have
    shares of any rows.
    """

    classes: tuple[OpenedClass, ...]
    stages: tuple[Stage, ...]
    loss: str | None
    metrics: str | None
    valid_targets: str | None
    weighs_terms: bool
    divisor: str | None
    imports: tuple[str, ...]
    inlined: frozenset[str]
    functions: tuple[Imported, ...] = ()
    own_rows: tuple[str, ...] = ()
    splits_rows: bool = False
    absent: tuple[str, ...] = ()


__all__ = ["Crossing", "Modules", "Opened", "OpenedClass", "Stage"]
