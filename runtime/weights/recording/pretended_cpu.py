"""Makes recorded tensors, which are on meta, look to the constructor like tensors on the CPU.

Many initialisers skip tensors on meta, and many constructors read values, such as those of a small
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, TypeGuard
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autopar.runtime.tensor.shards import put_into
from autopar.runtime.weights.plain_model import rejecting_by
from autopar.runtime.weights.recording.constants import in_all_threads, loading_maps
from autopar.runtime.weights.recording.recorded_ops import CPU, UnrecordableError, plainly
from autopar.runtime.weights.recording.recording import META, ConstructorRecording, Recorder

Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
Answer: TypeAlias = Callable[[ConstructorRecording, Any, Arguments, Keywords], Any]


def _read(recording: ConstructorRecording, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Answer a read of a tensor's values by running its recorded ops."""
    answer = func(*recording.real(args), **kwargs)
    if hasattr(answer, "flags"):
        answer.flags.writeable = False  # writing to this array would have no effect
        recording.lend(args[0], answer)
    return answer


def _indexed(recording: ConstructorRecording, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Index with recorded tensors in place of real ones, lists and arrays."""
    rest = [recording.on_meta(_as_tensor(value, args[0].dtype)) for value in args[2:]]
    index = args[1]
    if isinstance(index, list) and not _is_plain(index, is_flat=True):
        index = tuple(index)  # as torch interprets such a list
    return func(args[0], _as_tensors(recording, index), *rest, **kwargs)


def _as_tensor(value: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(value, (int, float, complex)) or hasattr(value, "__array__")
    return torch.tensor(value, dtype=dtype) if is_number and not _is_tensor(value) else value


def _as_tensors(recording: ConstructorRecording, index: Any) -> Any:
    """Return an index with tensors in place of lists and arrays."""
    if isinstance(index, tuple):
        return tuple(_as_tensors(recording, one) for one in index)
    if _is_tensor(index):
        return recording.on_meta(index)
    if hasattr(index, "__array__") or (isinstance(index, list) and index and _is_plain(index)):
        return recording.on_meta(torch.tensor(index))
    return index


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _is_plain(item: Any, *, is_flat: bool = False) -> bool:
    """Whether a value is an integer, or a (flat or nested) list of integers."""
    if isinstance(item, list):
        return all(not (is_flat and isinstance(one, list)) and _is_plain(one) for one in item)
    return isinstance(item, (int, bool))


def _moved(recording: ConstructorRecording, _func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run `tensor.to(…)`: a recorded tensor counts as on the CPU, so moving there does nothing."""
    tensor, *given = args
    kwargs = dict(kwargs)
    other = given[0] if given and isinstance(given[0], Tensor) else kwargs.pop("other", None)
    if other is not None:
        given = [META if recording.is_bare(other) else CPU, other.dtype, *given[1:]]
    places = [one for one in given if isinstance(one, (str, torch.device)) or _is_number(one)]
    place = places[0] if places else kwargs.pop("device", None)
    rest = [one for one in given if one is not None and not any(one is p for p in places)]
    dtype = rest.pop(0) if rest and not isinstance(rest[0], bool) else kwargs.pop("dtype", None)
    if place is not None and not _is_number(place) and torch.device(place).type == "meta":
        with recording.asked(True):
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=META)
    _check_place(place)
    return torch.Tensor.to(tensor, dtype or tensor.dtype, *rest, **kwargs)


def _check_place(place: Any) -> None:
    if place is not None and (_is_number(place) or torch.device(place).type != "cpu"):
        raise UnrecordableError(f"a tensor is moved to {place}, but the script does that itself")


def _is_number(one: Any) -> bool:
    return isinstance(one, int) and not isinstance(one, bool)


def _stayed(_recording: ConstructorRecording, _func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run `tensor.cpu()`."""
    layout = kwargs.get("memory_format", torch.preserve_format)
    return torch.Tensor.to(args[0], args[0].dtype, memory_format=layout)


def _typed(_recording: ConstructorRecording, _func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run `tensor.type(…)`, whose legacy types include a device."""
    with plainly():
        plain = torch.empty(0, dtype=args[0].dtype)
        typed = plain.type(*args[1:], **kwargs)
    return typed if isinstance(typed, str) else torch.Tensor.to(args[0], typed.dtype)


def _made_of_numbers(
    _recording: ConstructorRecording, func: Any, args: Arguments, kwargs: Keywords
) -> Any:
    """Run `tensor.new_tensor(…)`, which makes a real tensor of numbers, in the tensor's dtype."""
    with plainly():
        return func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs)


def _is_alike(recording: ConstructorRecording, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Answer whether a tensor may be assigned to another tensor's .data."""
    if any(map(recording.is_recorded, args)):
        return recording.is_bare(args[0]) is recording.is_bare(args[1])
    return func(*args, **kwargs)


def _assigned(recording: ConstructorRecording, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run `tensor.data = other`."""
    tensor, other = args
    if recording.is_bare(tensor) is not recording.is_bare(other):
        raise RuntimeError(_UNLIKE)
    if tensor.is_meta is other.is_meta:
        return func(*args, **kwargs)
    return _become(recording, tensor, other)


def _set(recording: ConstructorRecording, func: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Run `tensor.set_(other or storage, …)`."""
    tensor, *rest = args
    source = rest[0] if rest else next(iter(kwargs.values()), tensor)
    device = source.device  # the true device: this mode is off here
    if tensor.is_meta is (device.type == "meta"):
        return func(*args, **kwargs)
    if recording.is_bare(tensor):
        raise UnrecordableError("a tensor without memory is given some by set_")
    with plainly():
        made = torch.empty(0, dtype=tensor.dtype, device=device).set_(*rest, **kwargs)
    _become(recording, tensor, made)
    return tensor


def _become(recording: ConstructorRecording, tensor: Tensor, other: Tensor) -> None:
    """Turn a real tensor into a recorded tensor, or the reverse."""
    with plainly():
        put_into(tensor, other)
    recording.adopted.append(tensor)


def _unchanged(
    _recording: ConstructorRecording, _func: Any, args: Arguments, _kwargs: Keywords
) -> Any:
    """Return the tensor for calls that move it to another kind of memory."""
    return args[0]


def _located(
    recording: ConstructorRecording, _func: Any, args: Arguments, _kwargs: Keywords
) -> Any:
    """Return the address of a tensor."""
    tensor = args[0]
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    return recording.address(tensor.untyped_storage(), offset_bytes)


def _always(answer: Any) -> Answer:
    return lambda *_: answer


_UNLIKE = (  # torch's own text
    "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible "
    "tensor type."
)
_T: Any = torch.Tensor
ABOUT_RECORDED: Mapping[Any, Answer] = {
    _T.is_meta.__get__: _always(False),
    _T.is_cpu.__get__: _always(True),
    _T.device.__get__: _always(CPU),
    _T.is_shared: _always(False),
    _T.is_pinned: _always(False),
    **dict.fromkeys(
        (_T.tolist, _T.numpy, _T.__array__, _T.__dlpack__, _T.__format__, _T.__repr__), _read
    ),
    **dict.fromkeys((_T.__getitem__, _T.__setitem__), _indexed),
    _T.cpu: _stayed,
    _T.cuda: lambda *_: _check_place("cuda"),
    **dict.fromkeys((_T.share_memory_, _T.pin_memory), _unchanged),
    **dict.fromkeys((_T.new_tensor, _T.new), _made_of_numbers),
    _T.to: _moved,
    _T.type: _typed,
    _T.data_ptr: _located,
}
ABOUT_ANY: Mapping[Any, Answer] = {
    torch._has_compatible_shallow_copy_type: _is_alike,
    _T.data.__set__: _assigned,
    _T.set_: _set,
}


class _PretendedCpu(TorchFunctionMode):
    """A mode in which recorded tensors answer like tensors on the CPU."""

    def __init__(self, recording: ConstructorRecording) -> None:
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recording, keywords = self._recording, kwargs or {}
        if recording.is_over:
            return func(*args, **keywords)
        first = args[0] if args else None
        if isinstance(first, Tensor) and recording.is_recorded(first) and func in ABOUT_RECORDED:
            return ABOUT_RECORDED[func](recording, func, args, keywords)
        if func in ABOUT_ANY or getattr(func, "__name__", "").startswith("set_."):
            return ABOUT_ANY.get(func, _set)(recording, func, args, keywords)
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            return self._made(func, args, keywords)
        with recording.asked(self._is_on_meta(args, keywords)):
            return func(*args, **keywords)

    def _is_on_meta(self, args: Arguments, kwargs: Keywords) -> bool:
        """Whether a call makes meta tensors: it names meta, or has bare and no recorded tensors."""
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "meta"
        given = [one for one in tree_leaves(args) if _is_tensor(one)]
        bare = any(map(self._recording.is_bare, given))
        return bare and not any(map(self._recording.is_recorded, given))

    def _made(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Make a real tensor of data that may contain recorded tensors."""
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if isinstance(data, Tensor) and func is not torch.tensor:
            return func(*args, **kwargs)
        held = [one for one in tree_leaves(data) if isinstance(one, Tensor)]
        if any(map(self._recording.is_bare, held)):
            return func(*args, **kwargs)
        real = self._recording.real((args, kwargs))
        with _disable_current_modes():
            return func(*real[0], **real[1])


@contextmanager
def recorded(recording: ConstructorRecording) -> Iterator[None]:
    """Record the constructor that runs inside."""

    @contextmanager
    def modes() -> Iterator[None]:
        with Recorder(recording), _PretendedCpu(recording):
            yield

    def one_draw(original: Any, tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        if recording.is_recorded(tensor):
            recording.initialise(original, tensor, *args, generator=generator)
            return tensor
        with recording.draws.one(generator):
            filled: Tensor = original(tensor, *args, generator=generator)
            return filled

    recording.draws.begin()
    with (
        rejecting_by(one_draw),
        _settled_states(recording),
        _refused_storages(recording),
        loading_maps(recording.history.constants),
        in_all_threads(modes),
    ):
        yield
    recording.is_over = True


@contextmanager
def _settled_states(recording: ConstructorRecording) -> Iterator[None]:
    """Make the state of torch's generator correct where the constructor reads it."""

    def settled(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            recording.settle()
            return original(*args, **kwargs)

        return ask

    with ExitStack() as stack:
        for holder in (torch, torch.random):
            for name in ("get_rng_state", "initial_seed"):
                asked = settled(getattr(holder, name))
                stack.enter_context(patch.object(holder, name, asked))
        yield


@contextmanager
def _refused_storages(recording: ConstructorRecording) -> Iterator[None]:
    """Refuse access to a recorded tensor's storage, but answer for its address."""
    kind: Any = torch.UntypedStorage

    def refused(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, kind) and recording.holds(one) for one in args):
                recording.failure = UnrecordableError(f"{name} of a tensor's storage")
                raise recording.failure
            with _disable_current_modes():  # these methods make temporary tensors
                return original(*args, **kwargs)

        return call

    data_ptr: Callable[[Any], int] = kind.data_ptr

    def located(storage: torch.UntypedStorage) -> Any:
        return recording.address(storage) if recording.holds(storage) else data_ptr(storage)

    pickled: Callable[..., Any] = torch.Tensor._reduce_ex_internal

    def refused_pickle(tensor: Tensor, protocol: Any) -> Any:
        if recording.is_recorded(tensor):
            recording.failure = UnrecordableError("a tensor is pickled")
            raise recording.failure
        return pickled(tensor, protocol)

    with ExitStack() as stack:
        for name in ("copy_", "fill_", "__setitem__", "clone", "resize_"):
            stack.enter_context(patch.object(kind, name, refused(name)))
        stack.enter_context(patch.object(kind, "data_ptr", located))
        stack.enter_context(patch.object(torch.Tensor, "_reduce_ex_internal", refused_pickle))
        yield
