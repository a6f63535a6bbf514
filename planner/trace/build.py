"""Builds the model and its batch for a trace, on meta or on the CPU, and checks them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from autopar.planner.errors import InputError
from autopar.planner.model.guard import guarded
from autopar.planner.model.model_file import ModelFile
from autopar.planner.model.without_memory import with_memory, without_memory
from autopar.planner.trace.model_checks import (
    check_model,
    check_root_trains,
    check_structure,
    own_dtype,
)


def wide_buffers(model: nn.Module) -> Mapping[str, Tensor]:
    """Return floating-point buffers of more than 16 bits by name, except statistics of norms."""
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    kept = {id(buffer) for norm in norms for buffer in norm._buffers.values()}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.itemsize > 2 and id(buffer) not in kept
    }


def cast_tensors(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Cast float and complex tensors in place, because several modules may hold the same one."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        elif tensor.is_complex():  # to complex numbers with parts of that dtype
            tensor.data = tensor.data.to(torch.promote_types(dtype, torch.complex64))


# A prime, which few other sizes equal by chance; above 1, because torch specialises 0 and 1.
TRACED_BATCH = 7


Loss = Callable[[Any, Mapping[str, Any]], Any]


class TracedStep(nn.Module):
    """The traced module, which computes a batch's loss. Its only child is the model, as `model`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        keys: frozenset[str],
        *,
        path: Path,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.keys = keys
        self.path = path

    def run(
        self, batch: Mapping[str, Any], *, noted: Callable[[Loss], Loss] = lambda loss: loss
    ) -> torch.Tensor:
        """Return the loss of a batch; `noted` wraps the loss function, to record its call."""
        outputs = self.model(**{key: value for key, value in batch.items() if key in self.keys})
        if self.loss is None:
            where = f"{type(self.model).__name__}.forward, and {self.path} has no function `loss`"
            return checked_loss(outputs, where=where, fix=_NO_LOSS)
        where = f"loss of {self.path}"
        loss = noted(self._wide_loss)(outputs, batch)
        if isinstance(loss, (Mapping, tuple, list)):  # scripts use the result of `loss` unchanged
            raise InputError(
                f"loss returned {_kind(loss)}", where=where, expected=_LOSS, fix="return it alone"
            )
        return checked_loss(loss, where=where, fix=_ODD_LOSS)

    def _wide_loss(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        assert self.loss is not None
        return self.loss(_in_float32(outputs), _in_float32(batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSubject:
    """A model and a batch that are ready to be traced."""

    step: TracedStep
    batch: Mapping[str, Any]
    batch_size: int
    path: Path
    model_dtype: torch.dtype
    narrowed: frozenset[str] = frozenset()  # buffers cast to 16 bits
    shared: frozenset[str] = frozenset()  # keys of the batch whose tensors share memory

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.step.model


def build(
    model_file: ModelFile,
    *,
    device: str,
    dtype: torch.dtype | None,
    batch_size: int,
    narrowed: Collection[str] = (),
) -> TracedSubject:
    """Build the model on a device ("meta" takes no memory), and check it and its batch.

    If `dtype` is given, a float32 model and its batch are cast to it. If the batch holds float64,
    they are not: the cast would hide that float64 does not match the weights. If `dtype` has 16
    bits, a model's buffers are not cast, as in scripts, except those that `narrowed` names.
    """
    model = _model(model_file, device)
    own = own_dtype(model)
    raw = _batch(model_file, batch_size)
    keys = _accepted(model, raw, has_loss=model_file.loss is not None, path=model_file.path)
    if dtype is not None and own is torch.float32 and not _has_float64(raw):
        own = dtype
        is_half = dtype.itemsize < torch.float32.itemsize
        cast_tensors(model.parameters(), dtype)
        cast_tensors(() if is_half else model.buffers(), dtype)
    wide = wide_buffers(model)
    cast_tensors((wide[name] for name in narrowed), own)
    batch = {key: _placed(value, device, own) for key, value in raw.items()}
    return TracedSubject(
        step=TracedStep(model, model_file.loss, keys, path=model_file.path),
        batch=batch,
        batch_size=batch_size,
        path=model_file.path,
        model_dtype=own,
        narrowed=frozenset(narrowed),
        shared=_shared(raw),
    )


def _model(model_file: ModelFile, device: str) -> nn.Module:
    where, name = str(model_file.path), model_file.factory
    build_one = without_memory if device == "meta" else with_memory
    model: Any = build_one(model_file, partial(_look_through, path=model_file.path))
    if isinstance(model, type) and issubclass(model, nn.Module):
        fix = f"return {model.__name__}(…), not the class"
        raise InputError(f"{name} returned the class {model.__name__}", where=where, fix=fix)
    if not isinstance(model, nn.Module):
        found, fix = f"{name} returned {_kind(model)}", f"let {name} return the model, and it alone"
        raise InputError(found, where=where, expected="a torch.nn.Module", fix=fix)
    check_root_trains(model, model_file.build_model, name, where)
    _take_dense_gradients(model)
    return model


def _look_through(model: nn.Module, path: Path) -> None:
    with guarded("looking through the model", path):
        check_structure(model, str(path))
        check_model(model, str(path))


def _take_dense_gradients(model: nn.Module) -> None:
    """Make embeddings use dense gradients, as scripts do, because ranks sum them."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def _batch(model_file: ModelFile, batch_size: int) -> dict[str, Any]:
    where = f"example_batch of {model_file.path}"
    batch = model_file.example_batch(batch_size)
    if not isinstance(batch, Mapping):
        raise InputError(
            f"example_batch returned {_kind(batch)}",
            where=where,
            expected="a dict from argument names to tensors",
            fix='name each: {"x": …, "labels": …}, as forward and the loss call them',
        )
    for key, value in batch.items():
        _check_entry(key, value, batch_size, where)
        if type(value) is int and value == batch_size:
            _check_steady(key, batch_size, model_file.example_batch(batch_size + 1), where)
    if not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise InputError("the batch has no tensor", where=where)
    return dict(batch)


def _check_steady(key: str, rows: int, larger: Any, where: str) -> None:
    """Reject an entry that is the number of rows: the batch that a script has may be another."""
    if isinstance(larger, Mapping) and larger.get(key) == rows + 1:
        raise InputError(
            f"batch[{key!r}] is the number of rows",
            where=where,
            expected="plain numbers that are the same for every batch",
            fix="compute with x.shape[0] in the forward, of a tensor x of the batch",
        )


def _shared(batch: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of entries that share memory with another entry."""
    memory = {
        key: value.untyped_storage().data_ptr()
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    counts = Counter(memory.values())
    return frozenset(key for key, place in memory.items() if counts[place] > 1)


def _check_entry(key: object, value: object, batch_size: int, where: str) -> None:
    if not isinstance(key, str) or not key.isidentifier() or iskeyword(key) or key == "self":
        raise InputError(f"the batch has the key {key!r}", where=where, expected="argument names")
    if isinstance(value, (str, int, float, bool, type(None))):
        return  # an argument that is the same for every batch
    if not isinstance(value, torch.Tensor):
        expected = "tensors, or plain numbers and strings that are the same for every batch"
        fix = "give each tensor a key of its own" if isinstance(value, Mapping) else _AS_TENSOR
        raise InputError(
            f"batch[{key!r}] is {_kind(value)}", where=where, expected=expected, fix=fix
        )
    if value.device.type != "cpu":
        fix = "leave the device out: the emitted script moves each batch"
        raise InputError(f"batch[{key!r}] is on {value.device}", where=where, fix=fix)
    if value.layout != torch.strided or value.is_complex():
        found = f"batch[{key!r}] is {value.layout} of {value.dtype}"
        raise InputError(found, where=where, expected="dense real tensors")
    if value.dim() == 0 or value.shape[0] != batch_size:
        found = f"batch[{key!r}] has shape {list(value.shape)} for example_batch({batch_size})"
        expected = f"{batch_size} rows: the batch is dimension 0 of every tensor"
        raise InputError(found, where=where, expected=expected)


_AS_TENSOR = "torch.as_tensor makes one of a list of numbers or an array"


def _accepted(
    model: nn.Module, batch: Mapping[str, Any], *, has_loss: bool, path: Path
) -> frozenset[str]:
    """Return the keys that the model's forward takes; the others must be for the loss.

    A forward with `**batch` takes all keys, unless it names some and a loss takes the others.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    taken = named & set(batch)
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and not (has_loss and taken):
        taken = set(batch)
    unused = [key for key in batch if key not in taken]
    where = f"{path} and {type(model).__name__}.forward"
    if unused and not has_loss:
        found = f"forward does not take {', '.join(unused)} of the batch, and there is no loss"
        fix = "define loss(outputs, batch), or drop the key"
        raise InputError(found, where=where, expected=f"forward takes {sorted(named)}", fix=fix)
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.name in named and p.name not in batch
    ]
    if missing:
        found = f"forward needs {', '.join(missing)}, which the batch does not have"
        raise InputError(
            found,
            where=where,
            expected=f"a key for each argument; the batch has {sorted(batch)}",
            fix=f"let example_batch name it {missing[0]}",
        )
    return frozenset(taken)


def _has_float64(batch: Mapping[str, Any]) -> bool:
    return any(getattr(value, "dtype", None) is torch.float64 for value in batch.values())


_LOSS = "a scalar tensor with gradient"


def _in_float32(values: Any) -> Any:
    """Return values with 16-bit tensors in float32: 16 bits are too few for the loss's sums."""
    return tree_map_only(torch.Tensor, _wide, values)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


_NO_LOSS = "return it from the model (alone, first, or as `loss`), or define loss(outputs, batch)"
_ODD_LOSS = "return one number that backward can start from, such as the mean over the rows"


def checked_loss(outputs: Any, *, where: str = "", fix: str = _NO_LOSS) -> torch.Tensor:
    """Return the loss in the output of a model or a loss function; raise if it is no scalar."""
    loss = outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        loss = outputs["loss"]
    elif not isinstance(outputs, torch.Tensor) and getattr(outputs, "loss", None) is not None:
        loss = outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    if not isinstance(loss, torch.Tensor):
        found = f"the loss is {_kind(loss)}"
    elif loss.dim() != 0:
        sizes = ["B" if isinstance(size, torch.SymInt) else str(size) for size in loss.shape]
        found = f"the loss has shape [{', '.join(sizes)}], it is no scalar"
    elif not loss.dtype.is_floating_point:
        found = f"the loss is of type {loss.dtype}"
    else:
        return loss
    raise InputError(found, where=where, expected=_LOSS, fix=fix)


def _placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Return a copy of a batch's entry on a device; float32 becomes `dtype`.

    It is a copy because the exporter identifies inputs by object, and several entries of the batch
    may be the same tensor, or views of one.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.dtype is torch.float32 else value.dtype, copy=True)


def _kind(value: object) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"a plain {type(value).__name__.removeprefix('Sym').lower()}"
    return "None" if value is None else f"a {type(value).__name__}"
