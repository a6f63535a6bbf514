"""Gives a module data parallelism in place.

Hands on to the layers of `fully_shard` what its hooks would keep from them.

They gather parameters where a module is called, not where its forward is (`layer.forward(x)`), and
they give it new dicts and lists: what a layer writes there for others would be lost.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autopar.runtime.data_parallel.batch_norm import synchronise_batch_norms, widen_norms
from autopar.runtime.data_parallel.buckets import HALF_DTYPES, Averaging
from autopar.runtime.data_parallel.gradient_buckets import GradientBuckets
from autopar.runtime.model.parts import is_listed
from autopar.runtime.ranks.mesh import ALONE, Mesh
from autopar.runtime.tensor.shards import is_marked, made_like, places, tied_names


def run_hooks(module: nn.Module) -> None:
    """Have `module.forward(x)` do what `module(x)` does, with the containers that were given."""
    own, given = module.forward, list[Any]()  # what a call was given, once the hooks have run

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        given[:] = [(args, kwargs)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not given:
            return module(*args, **kwargs)
        first_args, first_kwargs = given.pop()
        args = _with_containers(first_args, args)
        kwargs = {key: _with_containers(first_kwargs.get(key), kwargs[key]) for key in kwargs}
        return own(*args, **kwargs)

    module.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    module.forward = forward


def _with_containers(given: Any, handed: Any) -> Any:
    """Return what a layer is handed, in the dicts and lists that were given."""
    if type(given) is not type(handed) or given is handed:
        return handed
    if isinstance(given, dict):
        for key in given:
            given[key] = _with_containers(given[key], handed[key])
        return given
    if isinstance(given, list):
        given[:] = map(_with_containers, given, handed)
        return given
    if type(given) is tuple:
        return tuple(map(_with_containers, given, handed))
    return handed


@contextmanager
def carried_marks(model: nn.Module) -> Iterator[None]:
    """Give what takes the place of parameters in the body their classes and attributes.

    Those that are sharded get them at once, for the optimizer; those that are gathered for a
    forward get them before it.
    """
    marked = {module: _marked(module) for module in model.modules()}
    yield
    for module, originals in marked.items():
        if originals:
            _carry(module, originals)
            module.register_forward_pre_hook(_Carrying(originals))


def _marked(module: nn.Module) -> dict[str, Tensor]:
    parameters = module._parameters.items()
    return {name: one for name, one in parameters if one is not None and is_marked(one)}


class _Carrying:
    """A hook that runs before a forward."""

    def __init__(self, originals: Mapping[str, Tensor]) -> None:
        self._originals = originals

    def __call__(self, module: nn.Module, _: Any) -> None:
        _carry(module, self._originals)


def _carry(module: nn.Module, originals: Mapping[str, Tensor]) -> None:
    for name, original in originals.items():
        parameter = module._parameters.get(name)
        if parameter is not None and not getattr(parameter, _CARRIES, False):
            setattr(made_like(parameter, original), _CARRIES, True)


_CARRIES = "_autopar_carries"  # marks a parameter that has them


def compute_in(
    module: nn.Module, half: torch.dtype, *, buffers: Collection[str], takes_received: bool
) -> None:
    """Take floating inputs in 16 bits, and hold the named buffers so; others keep their types.

    A rotary table that is rounded to bf16 is wrong by whole radians at far positions, and a moving
    mean that is written in bf16 stands still. Parameters that learn are in fp32 for now, whatever
    type they were built in: the optimizer takes that. A stage of a pipeline that `takes_received`
    has in order what the stage before gave, in the types that it has there.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES:
            parameter.data = parameter.data.to(torch.float32)
    for place in places(module):
        names = tied_names(module, place.name)
        if not isinstance(place.tensor, nn.Parameter) and any(is_listed(n, buffers) for n in names):
            place.tensor.data = _cast(place.tensor.data, half)

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args if takes_received else tuple(_cast(arg, half) for arg in args)
        return given, {name: _cast(arg, half) for name, arg in kwargs.items()}

    module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def narrow_frozen(module: nn.Module, half: torch.dtype) -> None:
    """Hold in 16 bits the parameters that do not learn: no optimizer needs more of them."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = _cast(parameter.data, half)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def wrap(
    module: nn.Module,
    mesh: Mesh,
    *,
    zero: int,
    bucket_bytes: int = 25 * 2**20,
    apart: Sequence[Collection[str]] = (),
    units: Sequence[nn.Module] = (),
    compute_dtype: torch.dtype | None = None,
    compress: bool = False,
    half_buffers: Collection[str] = (),
    sync_batch_norm: bool = False,
) -> nn.Module:
    """Give a module data parallelism in place and return it; names stay as they are.

    zero 0 and 1: whole parameters, gradients averaged by the bucket. With zero 1 each rank of
    mesh.shard gets its part of every bucket, and the optimizer steps that (`build_optimizer`).
    `apart` names parameters whose gradients are summed over other axes as well: ranks that sum must
    have the same parts, so what one entry names shares no bucket with others.

    zero 2 and 3: `fully_shard` over mesh.shard, copies over mesh.replica; `units` (the layers) are
    gathered one by one, the rest with the module itself. zero 3 frees a unit's gathered parameters
    after its forward and its backward, zero 2 after the last backward of a step (`set_last`). A
    unit that is small beside the largest one (a norm) goes with the module: a message of its own
    would cost its latency.

    compute_dtype bf16 or fp16: parameters and activations in 16 bits, gradients and the optimizer's
    copy in fp32. Parameters that learn stay in fp32 until `build_optimizer` has taken that. Buffers
    keep their types, but for those that `half_buffers` names. compress: gradients travel in 16
    bits.
    """
    half = compute_dtype if compute_dtype in HALF_DTYPES else None
    if compute_dtype is torch.float32:
        _widen(module)
    wire_dtype = (half or torch.bfloat16) if compress else None
    if sync_batch_norm:
        synchronise_batch_norms(module, mesh.data)
    if half is not None:
        compute_in(module, half, buffers=half_buffers, takes_received=mesh.pipeline.size > 1)
        widen_norms(module)
    if zero >= 2 and mesh.data.size > 1:
        _lay_in_order(module)
        # Planning has found who writes into what layers return, and has these return no views.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        policy = MixedPrecisionPolicy(
            param_dtype=half,
            reduce_dtype=wire_dtype or (None if half is None else torch.float32),
            cast_forward_inputs=False,  # a layer may be given fp32: angles of a rotary embedding
        )
        with carried_marks(module):
            _shard(module, mesh, units, policy=policy, frees_after_forward=zero == 3)
        object.__setattr__(module, "gathers_once", zero == 2)
        return module
    if half is not None:
        narrow_frozen(module, half)
    if half is not None or mesh.data.size > 1:
        averaging = _averaging(mesh, zero=zero, wire_dtype=wire_dtype)
        buckets = GradientBuckets(
            module, averaging, bucket_bytes=bucket_bytes, apart=apart, half=half
        )
        object.__setattr__(module, "gradient_buckets", buckets)
    return module


def _averaging(mesh: Mesh, *, zero: int, wire_dtype: torch.dtype | None) -> Averaging:
    if zero == 0:
        return Averaging(shard=ALONE, replica=mesh.data, wire_dtype=wire_dtype)
    return Averaging(shard=mesh.shard, replica=mesh.replica, wire_dtype=wire_dtype)


def buckets_of(module: nn.Module) -> GradientBuckets | None:
    """Return what averages the gradients of a wrapped module; None where fully_shard does."""
    return getattr(module, "gradient_buckets", None)


def set_last(module: nn.Module, is_last: bool) -> None:
    """Say whether the next backward is the last one of a step; it is, unless told otherwise.

    zero 0 and 1 average the gradients with the last one. zero 2 keeps the parameters gathered until
    then. Others leave nothing to the end.
    """
    buckets = buckets_of(module)
    if buckets is not None:
        buckets.sync = is_last
    elif gathers_once(module):
        module.set_reshard_after_backward(is_last)


def gathers_once(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether parameters stay gathered from the first forward of a step to the last backward."""
    return isinstance(module, FSDPModule) and getattr(module, "gathers_once", False)


def _shard(
    module: nn.Module,
    mesh: Mesh,
    units: Sequence[nn.Module],
    *,
    policy: MixedPrecisionPolicy,
    frees_after_forward: bool,
) -> None:
    """Shard the units, inner ones first, then the module with all that is left."""
    device_mesh = _shard_mesh(mesh)
    chosen = {id(unit) for unit in _large(units) if unit is not module}
    shared = _shared_parameters(module)
    for child in reversed(list(module.modules())):
        if id(child) not in chosen or shared.intersection(map(id, child.parameters())):
            continue  # a weight that two modules share must lie in one unit: the outermost
        fully_shard(
            child,
            mesh=device_mesh,
            reshard_after_forward=frees_after_forward,
            mp_policy=policy,
        )
        run_hooks(child)
    # The backward begins with what the module itself holds: it would be gathered again at once.
    fully_shard(module, mesh=device_mesh, reshard_after_forward=False, mp_policy=policy)


def _large(units: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out units that have less than a tenth of the elements of the largest."""
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    return [unit for unit, size in zip(units, sizes, strict=True) if 10 * size >= max(sizes)]


def _shard_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the data axis as fully_shard wants it: (shard) or, with copies, (replica, shard)."""
    names = ("replica", "shard") if mesh.replica.size > 1 else ("shard",)
    return mesh.device_mesh[names if len(names) > 1 else names[0]]


def _shared_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters that have more than one name, as those of a shared module do."""
    places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in places.items() if count > 1}


def _lay_in_order(module: nn.Module) -> None:
    """Lay out row by row what was built otherwise (channels_last), as fully_shard wants it."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


def _widen(module: nn.Module) -> None:
    """Hold in fp32 what was built in 16 bits altogether; what is mixed on purpose stays."""
    own = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if own and own.issubset(HALF_DTYPES):
        module.to(torch.float32)
