"""Gives a module data parallelism in place.

Also works around two limits of `fully_shard`. Its hooks do not gather parameters if a module's
forward is called directly (`layer.forward(x)`). And they pass copies of dicts and lists to a layer,
so that its writes to them are lost.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from autopar.runtime.data_parallel.averaging import COMPRESSORS, HALF, NOTHING
from autopar.runtime.data_parallel.batch_norm import synchronise_batch_norms, widen_norms
from autopar.runtime.data_parallel.buckets import HALF_DTYPES, Sharding, averaging_of, sharding_of
from autopar.runtime.data_parallel.gradient_buckets import GradientBuckets
from autopar.runtime.model.parts import in_float8
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.transport import HostLink
from autopar.runtime.tensor.chunked_logits import chunks_logits
from autopar.runtime.tensor.shards import (
    is_listed,
    is_marked,
    made_like,
    places,
    start_on_host,
    starts_on_host,
    tied_names,
)

__all__ = ["set_last", "wrap"]  # for scripts

BUCKET_BYTES = 25 * 2**20  # DDP's default


def run_hooks(module: nn.Module) -> None:
    """Make `module.forward(x)` run the hooks of `module(x)`, with the caller's containers."""
    # `given`: a call's arguments before fully_shard's hooks copy them; empty if the caller calls
    # `forward` directly
    own, given = module.forward, list[Any]()

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
    """Return a layer's arguments, but with the caller's own dicts and lists."""
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
    """Copy classes and attributes of parameters to the parameters that replace them in the `with`.

    Sharded parameters get them at the end of the `with`, for the optimizer. Gathered parameters get
    them before each forward.
    """
    marked = {module: _marked(module) for module in model.modules()}
    yield
    for module, originals in marked.items():
        if originals:
            _carry(originals, module)
            module.register_forward_pre_hook(partial(_carry, originals))


def _marked(module: nn.Module) -> dict[str, Tensor]:
    parameters = module._parameters.items()
    return {name: one for name, one in parameters if one is not None and is_marked(one)}


def _carry(originals: Mapping[str, Tensor], module: nn.Module, _: Any = None) -> None:
    for name, original in originals.items():
        parameter = module._parameters.get(name)
        if parameter is not None and not getattr(parameter, _CARRIES, False):
            setattr(made_like(parameter, original), _CARRIES, True)


_CARRIES = "_autopar_carries"  # marks a parameter that has the original's attributes


def compute_in(
    module: nn.Module, half: torch.dtype, *, buffers: Collection[str], takes_received: bool
) -> None:
    """Make a module take floating inputs in 16 bits, and cast the named buffers.

    Other buffers keep their dtypes: a rotary table rounded to bf16 is off by whole radians at far
    positions, and a moving mean in bf16 never changes. Trainable parameters stay in fp32 until the
    optimizer has copied them. A pipeline stage (`takes_received`) does not cast the tensors that it
    receives.
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


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def wrap(
    module: nn.Module,
    mesh: Mesh,
    *,
    zero: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    apart: Sequence[Collection[str]] = (),
    units: Sequence[nn.Module] = (),
    compute_dtype: torch.dtype | None = None,
    compress: str = NOTHING,
    half_buffers: Collection[str] = (),
    sync_batch_norm: bool = False,
    offload: bool = False,
) -> nn.Module:
    """Give a module data parallelism in place and return it; names stay as they are.

    zero 0 and 1: whole parameters, gradients averaged bucket by bucket. With zero 1 each rank of
    mesh.shard gets one part of every bucket, and its optimizer steps that part (`build_optimizer`).
    `apart` has sets of names of parameters whose gradients are also summed over other axes. The
    ranks of such a sum must hold the same parts of buckets, so each set has buckets of its own.

    zero 2 and 3: `fully_shard` over mesh.shard, copies over mesh.replica. `units` (the layers) are
    gathered one by one, all other parameters with the module itself. zero 3 frees a unit's gathered
    parameters after its forward and its backward; zero 2 frees them after the last backward of a
    step (`set_last`). A small unit (a norm) is gathered with the module: its own message would
    mostly cost latency.

    compute_dtype bf16 or fp16: parameters and activations in 16 bits, gradients and the optimizer's
    copy in fp32. Trainable parameters stay in fp32 until `build_optimizer` has copied them. Buffers
    keep their dtypes, except those in `half_buffers`.

    compress: how gradients are sent. "half": in 16 bits. "int8": in 8 bits. "powersgd": matrices as
    products of two thin ones, other gradients uncompressed. With the last two, the errors of
    compression are added to the next gradients, and gradients in `apart` are uncompressed.

    offload: reduced gradients go to the host's memory in every backward, and the optimizer has its
    copy of the parameters and its states there. zero 2 and 3 gather parameters from there.

    With local steps (`Mesh.sync_every`), gradients and statistics of batch norms are averaged over
    a replica's ranks, mesh.shard; `OuterOptimizer` averages the replicas.
    """
    half = compute_dtype if compute_dtype in HALF_DTYPES else None
    if compute_dtype is torch.float32:
        _widen(module)
    wire_dtype = (half or torch.bfloat16) if compress == HALF else None
    compressor = COMPRESSORS[compress](mesh.device) if compress in COMPRESSORS else None
    if sync_batch_norm:
        synchronise_batch_norms(module, mesh.averaging)
    if half is not None:
        compute_in(module, half, buffers=half_buffers, takes_received=mesh.pipeline.size > 1)
        widen_norms(module)
    sharding = sharding_of(zero)
    if compressor is not None and (sharding.shards_modules or offload or half is torch.float16):
        raise RuntimeError(
            f"{compress} gradients need zero 0 or 1, no offloading, and no fp16, because the "
            "errors of earlier steps have an older loss scale: plan with --zero 1, or without them"
        )
    if sharding.shards_modules and (mesh.averaging.size > 1 or offload):
        for parameter in module.parameters():  # fully_shard refuses channels_last
            parameter.data = parameter.data.contiguous()
        # Only layers whose outputs are written to must return no views. The planner has found
        # these, and the script calls `keep_apart` for them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        policy = MixedPrecisionPolicy(
            param_dtype=half,
            reduce_dtype=wire_dtype or (None if half is None else torch.float32),
            # a layer may need fp32 inputs, such as angles of a rotary embedding
            cast_forward_inputs=False,
        )
        is_pinned = mesh.device.type == "cuda"
        host = CPUOffloadPolicy(pin_memory=is_pinned) if offload else OffloadPolicy()
        with carried_marks(module):
            _shard(module, mesh, units, sharding, policy=policy, host=host)
        for parameter in module.parameters() if offload else ():
            start_on_host(parameter)
        object.__setattr__(module, "gathers_once", sharding.gathers_once)
        return module
    if half is not None:
        for parameter in module.parameters():
            if not parameter.requires_grad:  # no optimizer needs these in fp32
                parameter.data = _cast(parameter.data, half)
    for parameter in module.parameters() if offload else ():
        if parameter.requires_grad:
            start_on_host(parameter)
    if half is not None or mesh.averaging.size > 1 or offload:
        averaging = averaging_of(mesh, sharding, wire_dtype)
        link = HostLink(mesh.device) if offload else None
        buckets = GradientBuckets(
            module,
            averaging,
            bucket_bytes=bucket_bytes,
            apart=apart,
            half=half,
            link=link,
            compressor=compressor,
        )
        object.__setattr__(module, "gradient_buckets", buckets)
    return module


def buckets_of(module: nn.Module) -> GradientBuckets | None:
    """Return the buckets of a wrapped module; None if it needs none, as with fully_shard."""
    return getattr(module, "gradient_buckets", None)


def set_last(module: nn.Module, is_last: bool) -> None:
    """Say whether the next backward is the last one of a step; without this call, each is.

    zero 0 and 1 average gradients in the last backward, or in all if they go to the host. zero 2
    frees the gathered parameters after it. zero 3 ignores this.
    """
    buckets = buckets_of(module)
    if buckets is not None:
        buckets.sync = is_last or buckets.link is not None
    elif gathers_once(module):
        module.set_reshard_after_backward(is_last)


def gathers_once(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether parameters stay gathered from the first forward of a step to the last backward."""
    return isinstance(module, FSDPModule) and getattr(module, "gathers_once", False)


def float8_gathers(parts: Sequence[nn.Module], shard: Axis) -> Callable[..., None] | None:
    """Let zero 3 gather weights of float8 products in float8, in half of the bytes.

    Each rank casts its part of a weight, by the scale of the whole weight. Returns the function
    that computes the scales, to be called after each change of the weights; None if no weight is
    gathered in float8 (with other scalings, zero 2, or weights on the host). Weights whose parts
    differ in size are gathered as they are.
    """
    found = [
        (module, part)
        for module, scaling in in_float8(one for one in parts if not gathers_once(one)).items()
        for part in (getattr(module.weight, "_local_tensor", None),)
        if part is not None and scaling.gathers and not starts_on_host(module.weight)
        if part.shape[0] * shard.size == module.weight.shape[0]
    ]
    if not found:
        return None
    from torchao.float8.float8_utils import amax_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    def compute_scales(*_: Any) -> None:
        largest = torch.stack(torch._foreach_norm([part.detach() for _, part in found], math.inf))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
        for (module, part), most in zip(found, largest, strict=True):
            dtype = module.config.cast_config_weight.target_dtype
            scale = amax_to_scale(most, dtype, round_scales_to_power_of_2=True)
            cast = WeightWithDynamicFloat8CastTensor(part, module.linear_mm_config, dtype, scale)
            # fully_shard looks for these attributes
            part.fsdp_pre_all_gather = cast.fsdp_pre_all_gather
            part.fsdp_post_all_gather = cast.fsdp_post_all_gather

    compute_scales()
    return compute_scales


def _shard(
    module: nn.Module,
    mesh: Mesh,
    units: Sequence[nn.Module],
    sharding: Sharding,
    *,
    policy: MixedPrecisionPolicy,
    host: OffloadPolicy,
) -> None:
    """Shard the units, inner ones first, then the module with all remaining parameters."""
    device_mesh = _shard_mesh(mesh)
    chosen = {id(unit) for unit in _large(units) if unit is not module}
    shared = _shared_parameters(module)
    for child in reversed(list(module.modules())):
        if id(child) not in chosen or shared.intersection(map(id, child.parameters())):
            continue  # a weight shared by two modules must belong to one unit: the outermost
        fully_shard(
            child,
            mesh=device_mesh,
            # a loss in chunks reads the weight after the layer's forward
            reshard_after_forward=sharding.frees_after_forward and not chunks_logits(child),
            mp_policy=policy,
            offload_policy=host,
        )
        run_hooks(child)
    # The backward starts with the module's own parameters: freed after the forward, they would be
    # gathered again at once.
    fully_shard(
        module,
        mesh=device_mesh,
        reshard_after_forward=False,
        mp_policy=policy,
        offload_policy=host,
    )


def _large(units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units with at least a tenth as many elements as the largest unit."""
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units]
    return [unit for unit, size in zip(units, sizes, strict=True) if 10 * size >= max(sizes)]


def _shard_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the data axis in fully_shard's form: (shard), or with copies (replica, shard).

    With local steps, fully_shard knows only the replica's own ranks.
    """
    has_copies = mesh.replica.size > 1 and not mesh.sync_every
    names = ("replica", "shard") if has_copies else ("shard",)
    return mesh.device_mesh[names if len(names) > 1 else names[0]]


def _shared_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters that have more than one name."""
    places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in places.items() if count > 1}


def _widen(module: nn.Module) -> None:
    """Cast a model built entirely in 16 bits to fp32; leave a model of mixed dtypes as it is."""
    own = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if own and own.issubset(HALF_DTYPES):
        module.to(torch.float32)
