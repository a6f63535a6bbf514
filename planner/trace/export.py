"""Runs torch.export, suppresses what it prints, and reports a failure as one message."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from autopar.planner.errors import AutoparError, TraceError, text_of
from autopar.planner.model.guard import contained
from autopar.planner.model.outside import state_scope
from autopar.planner.trace.build import TracedSubject
from autopar.planner.trace.model_checks import failing_place
from autopar.planner.trace.record import TraceRecording, recorded
from autopar.planner.trace.replaced_calls import (
    ctc_traced,
    grouped_products_traced,
    inference_without_gradients,
    loss_of_each_row,
    own_checkpoints_noted,
    refuse_call,
    refuse_learning_outside,
    refused_weight_swaps,
    sliced,
    without_outs,
)
from autopar.planner.trace.running import (
    GRAD_FN,
    expressions_noted,
    functions_noted,
    note_gradient_use,
    note_library_op,
    saving_noted,
    traced_step,
)
from autopar.planner.trace.scalar_questions import (
    AT_RANDOM,
    answered,
    deciding_noted,
    fixing_noted,
    lengths_as_sizes,
    note_drawn,
    tensor_of_numbers,
)
from autopar.planner.trace.scatter import picked
from autopar.planner.trace.symbols import RowsInNumberError
from autopar.planner.trace.traps import LeftBehind, no_foreign_randomness
from autopar.planner.trace.unlike_types import (
    NoKernelError,
    UnlikeTypesError,
    trace_hidden,
    unchecked,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTrace:
    """The exported program, with the recorded module calls."""

    program: ExportedProgram
    recording: TraceRecording
    subject: TracedSubject
    fixed_at: str  # where the model treated the number of rows as a constant, or ""
    lone_at: str  # where the model decides whether there is a single row, or ""
    recomputed_at: str  # where the model uses checkpointing itself, or ""
    was_noticed: bool

    @property
    def fixed_batch(self) -> int | None:
        """The batch size of the trace if the model fixed it; None if it is still a symbol."""
        wanted = self.program.graph_signature.user_inputs
        nodes = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        sizes = [nodes[name].meta["val"].shape[0] for name in wanted if name in nodes]
        # A symbol that the model compared with a number still exists, but has that value.
        is_fixed = any(isinstance(size, int) or size.node.expr.is_number for size in sizes)
        return self.subject.batch_size if is_fixed else None


class DecidedByValuesError(TraceError):
    """The values of a tensor decide which code the model runs."""


class UnlikeSizesError(TraceError):
    """Sizes do not match; they would not match in another dtype or on another device, either."""


class DevicesMeetError(TraceError):
    """The model creates tensors on the CPU, even if it is on another device."""


def export(
    subject: TracedSubject,
    *,
    fold: bool,
    is_noticed: bool = False,
    has_fixed_rows: bool = False,
    found: LeftBehind | None = None,
) -> ExportedTrace:
    """Export a subject's step; the batch size is a symbol unless `has_fixed_rows`.

    With `fold`, repeated blocks run only once. With `is_noticed`, the model can detect that it is
    traced. `found` is the Python state that an earlier step left behind.

    torch's cache of the shapes that ops return is off: it computes each new entry a second time to
    check it, and few ops of a trace occur twice with equal shapes.
    """
    tensors = {k: v for k, v in subject.batch.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in subject.batch.items() if k not in tensors}
    outside = state_scope(subject.path, subject.model)
    try:
        with (
            quiet(),
            contained(subject.path),
            no_foreign_randomness(subject.model),
            recorded(subject.model, outside, fold=fold, found=found) as recording,
            functions_noted(recording),
            fixing_noted() as fixing,
            deciding_noted() as deciding,
            lengths_as_sizes(),
            own_checkpoints_noted() as recomputing,
            ctc_traced(),
            expressions_noted(),
            grouped_products_traced(),
            inference_without_gradients(),
            refused_weight_swaps(),
            contextlib.nullcontext() if is_noticed else trace_hidden(),
            saving_noted(recording),
            outside.kept(),  # the exporter replaces containers of modules by copies
            torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
            _OnMeta(recording),
        ):
            program = torch.export.export(
                traced_step(subject.step, tensors, constants, recording),
                (),
                tensors,
                dynamic_shapes=None if has_fixed_rows else {key: {0: Dim.AUTO} for key in tensors},
                strict=False,
            )
    except (AutoparError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise trace_error(error, subject) from error
    if deciding.by_number:
        where = deciding.by_number[0]
        raise RowsInNumberError("the model decides by its number of rows", where=where)
    without_outs(program.graph_module)
    return ExportedTrace(
        program=program,
        recording=recording,
        subject=subject,
        fixed_at=next(iter(fixing), ""),
        lone_at=next(iter(deciding.by_one), ""),
        recomputed_at=next(iter(recomputing), ""),
        was_noticed=is_noticed,
    )


class _OnMeta(TorchFunctionMode):
    """Preserves information that the meta device or the exporter would lose.

    The numbers in `x[..., [-2], :]` and `torch.tensor(0.5, device=x.device)` are kept,
    `x.type(dtype)` stays on its device, and `x.data` depends on x. Uses of gradients are recorded,
    because they leave no op.
    """

    def __init__(self, recording: TraceRecording) -> None:
        super().__init__()
        self.recording, self.found = recording, recording.found or LeftBehind()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or its replacement in a trace."""
        del types
        kwargs = kwargs or {}
        if type(func) is _OF_AN_ATTRIBUTE and func not in _ATTRIBUTES:
            # by far the most frequent calls, such as x.shape
            return self._attribute(func, args, kwargs)
        refuse_call(func)
        if self.recording.is_running:
            refuse_learning_outside(args)
        self.found.note_read((args, kwargs))
        taken = note_gradient_use(func, args, kwargs, self.recording)
        if taken is not None:
            return taken
        answer = answered(func, args)
        if answer is not None:
            return answer
        if func is torch.Tensor.type and isinstance(args[-1], torch.dtype):
            func = torch.Tensor.to
        if func == _DATA.__get__:
            func = torch.Tensor.detach
        if func == _DATA.__set__:
            raise RuntimeError(_REPLACED)
        numbers = tensor_of_numbers(func, args, kwargs)
        if numbers is not None:
            return numbers
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            index = tuple(
                torch.tensor(i, device="cpu") if isinstance(i, list) else i for i in args[1]
            )
            args = (args[0], index)
        results = (way(func, args, kwargs) for way in (picked, loss_of_each_row, unchecked, sliced))
        result = next((one for one in results if one is not None), None)
        result = func(*args, **kwargs) if result is None else result
        note_drawn(func, args, result)
        note_library_op(func, args, kwargs, result, self.recording)
        return result

    def _attribute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):  # a view, such as x.T
            self.found.note_read(args)
        return result


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the exporter's output: on failure it prints the whole graph."""
    sink = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


_DATA: Any = torch.Tensor.data
_OF_AN_ATTRIBUTE = type(_DATA.__get__)
_ATTRIBUTES = (_DATA.__get__, _DATA.__set__, GRAD_FN)
_BY_VALUES = "the model decides on the values of a tensor ({line})"
_UNLIKE_TYPES = "element types do not match ({summary})"
_DEVICES = "tensors on different devices meet ({summary})"
_NO_KERNEL = "torch does not compute this in the type of the weights ({summary})"
_KINDS: Mapping[str, type[TraceError]] = MappingProxyType(
    {
        _BY_VALUES: DecidedByValuesError,
        _UNLIKE_TYPES: UnlikeTypesError,
        _NO_KERNEL: NoKernelError,
        _DEVICES: DevicesMeetError,
    }
)
_REPLACED = "a tensor is given other numbers"
_UNLIKE_SIZES = (
    "attempting to expand a dimension|broadcast a dimension|must match the size of tensor|"
    r"to match target batch_size|Sizes of tensors must match|size mismatch|shape '.*' is invalid"
)
# a pattern for an error's text; what autopar says of the fault, and what to do
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        _REPLACED,
        "the forward replaces the numbers of a tensor ({line})",
        "compute a new tensor; state that changes in training is a buffer, written by copy_",
    ),
    (
        AT_RANDOM,
        "the model decides by a random number which code it runs ({line})",
        "run the same code at every step: set the probability of dropping layers to 0",
    ),
    (
        r"FlexAttention|flex_attention",
        "the model uses flex_attention, which has no plain graph",
        "use F.scaled_dot_product_attention, with the scores' bias or mask as attn_mask",
    ),
    (
        r"GuardOnDataDependent|DataDependentOutput|data-dependent|_local_scalar_dense|unbacked",
        _BY_VALUES,
        "use torch.where or a mask instead of `if` on tensor values, or decide before the forward",
    ),
    (
        r"must match the size of tensor .*//2",
        "the model combines halves of the batch, which may have an odd number of rows ({summary})",
        "give each half as a key of its own, and join them in the forward with torch.cat",
    ),
    (
        r"not linked with support for cuda|not compiled with CUDA|Found no NVIDIA driver",
        "the forward moves a tensor to a device ({line})",
        "create tensors on the device of an input: the script moves the model and each batch",
    ),
    (
        r"Batching rule not implemented for autopar",
        "the model maps a module over rows with torch.vmap, which has no plain graph ({line})",
        "compute all rows at once, by broadcasting",
    ),
    (
        r"UnsupportedOperator.*sparse",
        "the model makes a sparse tensor ({line})",
        "compute with dense tensors, or with an index and values",
    ),
    (
        r"UnsupportedOperator",
        "torch cannot compute the shapes that {summary} returns without values ({line})",
        "write it with other ops; for an op of your own: torch.library.register_fake",
    ),
    (
        r"numpy",
        "the model leaves torch for numpy ({summary})",
        "compute with torch in the forward, or with numpy in the data set",
    ),
    (
        r"argument #1 'indices'",
        "an embedding gets indices that are not integers ({summary})",
        "give integers in example_batch: torch.randint, or .long()",
    ),
    (
        r"does not require grad|element 0 of tensors",
        "the loss has no gradient ({summary})",
        "derive the loss from the parameters; look for .detach(), .item() or no_grad",
    ),
    (
        r"(same dtype|expected scalar type|dtype mismatch|and (bias|weight) type .* be the same)",
        _UNLIKE_TYPES,
        "cast explicitly to the type of the other operand",
    ),
    (
        r"(Unsupported dtype|Low precision dtypes|not implemented for '(BFloat16|Half)'|"
        r"only supported for half, float|to be Half, Float or Double|either float or double)",
        _NO_KERNEL,
        "give the op x.float(), and cast its result back",
    ),
    (
        r"(not on the expected device|different devices|Expected all tensors)",
        _DEVICES,
        "create tensors on the device of an input: torch.arange(n, device=x.device)",
    ),
    (
        r"(device meta|on meta)",
        "the model reads values of tensors, but is too large to be traced with values ({summary})",
        "compute with tensors alone, and create them on the device of an input",
    ),
)


def trace_error(error: BaseException, subject: TracedSubject) -> TraceError:
    """Return the error of a failed trace as one message with file, line and module."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    summary = _summary(root)
    where = failing_place(error, subject.model) or failing_place(root, subject.model)
    text, fix = f"running the model failed: {type(root).__name__}: {summary}", ""
    kind, expected = TraceError, ""
    if isinstance(root, RuntimeError | ValueError | IndexError):  # torch's errors about sizes
        expected = f"sizes that go with the batch, where {_in_words(subject)}"
        kind = UnlikeSizesError if re.search(_UNLIKE_SIZES, text_of(root)) else TraceError
    for pattern, found, remedy in _REASONS:
        if re.search(pattern, f"{type(root).__name__} {text_of(root)}"):
            text, fix = found.format(summary=summary, line=_line(where) or summary), remedy
            kind, expected = _KINDS.get(found, TraceError), ""
            break
    return kind(text, where=where or str(subject.path), expected=expected, fix=fix)


def _in_words(subject: TracedSubject) -> str:
    """Return the sizes of each tensor of the batch, with its rows as B."""
    shapes = (
        f"{key} is [{', '.join(['B', *map(str, value.shape[1:])])}]"
        for key, value in subject.batch.items()
        if isinstance(value, torch.Tensor)
    )
    return ", ".join(shapes)


def _line(where: str) -> str:
    """Return the line of code that a result of failing_place names, or ""."""
    place = re.match(r"(.+):(\d+)(, in module|$)", where)
    return linecache.getline(place[1], int(place[2])).strip() if place else ""


def _summary(error: BaseException) -> str:
    """Return the first informative line of a torch error, with the batch's symbol as B."""
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    first = re.sub(r"\bs\d+\b", "B", lines[0]) if lines else type(error).__name__
    return first if len(first) <= 200 else first[:197] + "…"
