"""Controls the random numbers of ranks: seeds, generators, and regions without randomness.

In a region without randomness dropout is off, and random ops return constants. Different splits of
a model draw different random numbers, so their losses can only be compared in such a region.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.runtime.ranks.mesh import Axis, Mesh

__all__ = ["seed_all", "split_randomness"]  # for scripts

States: TypeAlias = Sequence[Tensor]


def generator_states() -> States:
    """Return the states of the CPU generator and, if a GPU is in use, of its generator."""
    device = _device_in_use()
    cpu = torch.get_rng_state()
    return (cpu,) if device is None else (cpu, device.get_rng_state())


def set_generator_states(states: States) -> None:
    """Set the generators to states that `generator_states` returned."""
    cpu, *others = states
    torch.set_rng_state(cpu)
    for state in others:
        device = _device_in_use()
        assert device is not None
        device.set_rng_state(state)


def _device_in_use() -> Any | None:
    """Return torch's module for the accelerator (torch.cuda), if this process already uses it.

    Asking a GPU for its generator's state would initialise it.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    has_begun = getattr(module, "is_initialized", None)
    return module if has_begun is None or has_begun() else None


def mixed_seed(*numbers: int) -> int:
    """Hash numbers into a seed; different numbers give different seeds, unlike with a sum."""
    text = "/".join(str(number) for number in numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_cpu_generators(seed: int) -> None:
    """Seed the CPU generators: torch, Python and, if it is imported, numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def cpu_generators_restored() -> Iterator[None]:
    """Restore the CPU generators after the body."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators for the body, those of devices too, and restore them afterwards."""
    has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if has_device else []
    with cpu_generators_restored(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        seed_cpu_generators(seed)
        yield


def seed_all(seed: int, mesh: Mesh) -> None:
    """Seed this process; tensor ranks get equal seeds, data and pipeline ranks different ones."""
    torch.manual_seed(mixed_seed(seed, mesh.data.rank, mesh.pipeline.rank))


@contextmanager
def split_randomness(axis: Axis) -> Iterator[None]:
    """Make random numbers of the body differ between ranks, as dropout of split tensors requires.

    The seed is drawn from the CPU generator. Its state is the same on every rank of the axis, and
    activation recomputation restores it, so a recomputed region gets the same masks.
    """
    if axis.size == 1 or detect_fake_mode() is not None:  # fake tensors have no values to seed with
        yield
        return
    seed = mixed_seed(int(torch.randint(2**62, ()).item()), axis.rank)
    generators = _generators()
    states = [one.get_state() for one in generators]
    for one in generators:
        one.manual_seed(seed)
    try:
        yield
    finally:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)


def _generators() -> list[torch.Generator]:
    """Return the generators in use.

    Seeding only these is faster than torch.manual_seed, which takes 0.1 ms for all devices.
    """
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


Run: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_DRAWN = 0.5  # returned in place of every random number
_GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples are evenly distributed
_DRAWING = frozenset(
    {
        torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal,
        Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_,
        torch._standard_gamma,
    }
)  # fmt: skip
# functions whose results are random counts; each returns 1
_COUNTING = frozenset(
    {
        torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_, Tensor.geometric_, torch.binomial,
        torch.poisson,
    }
)  # fmt: skip
_DROPOUTS = frozenset(
    {
        functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
        functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_,
        torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_,
        torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    }
)  # fmt: skip
_RANDOM_SLOPES = frozenset({functional.rrelu, torch.rrelu, torch.rrelu_})
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
# the index of `dropout_p` among positional arguments
_DROPOUT_PLACES = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}
_CHOOSING = frozenset({torch.randperm, torch.multinomial, Tensor.multinomial})
_RANDOM_INTEGERS = frozenset({torch.randint, torch.randint_like, Tensor.random_})


class NoRandomness(TorchFunctionMode):
    """A mode in which code applies no dropout and draws no random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function without randomness."""
        del types
        return undrawn(func, args, kwargs or {}, lambda one, given, named: one(*given, **named))


def undrawn(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> Any:
    """Call a torch function with `run`, without dropout and without random numbers."""
    kwargs = dict(kwargs)
    if func in _DROPOUTS:
        return args[0] if args else kwargs["input"]
    if func is functional.gumbel_softmax:
        return _gumbel_softmax(*args, **kwargs)
    if func in _RANDOM_SLOPES:
        args, kwargs["training"] = args[:3], False
    if func in _RECURRENT:  # their only fractional argument is the dropout probability
        args = tuple(0.0 if isinstance(one, float) else one for one in args)
    if func in _COUNTING:
        return func(*args, **kwargs).fill_(1)
    if func in _DRAWING:
        drawn = func(*args, **kwargs).fill_(_DRAWN)
        return _spread(drawn) if func is torch.rand else drawn
    if func in _RANDOM_INTEGERS:
        return func(*args, **kwargs).fill_(_middle(args, kwargs))
    if func in _CHOOSING:
        chosen = func(*args, **kwargs)
        return chosen.copy_(torch.arange(chosen.shape[-1], device=chosen.device))
    place = _DROPOUT_PLACES.get(func)
    if place is not None and len(args) > place:
        args = (*args[:place], 0.0, *args[place + 1 :])
    elif place is not None:
        kwargs["dropout_p"] = 0.0
    return run(func, args, kwargs)


def _spread(drawn: Tensor) -> Tensor:
    """Fill each row of a 2-D `torch.rand` with the same evenly spread numbers.

    Some of these are below any threshold. If all were the same number, `torch.rand(rows, places) <
    0.15` would mask nothing, and the loss would be nan.
    """
    if drawn.dim() != 2:
        return drawn
    places = torch.arange(drawn.shape[1], device=drawn.device, dtype=torch.float64)
    return drawn.copy_((_DRAWN + _GOLDEN * places) % 1)


def _middle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the middle of the range of randint and similar functions."""
    ends = [one for one in args if isinstance(one, int)]
    ends += [kwargs[name] for name in ("from", "low", "to", "high") if kwargs.get(name) is not None]
    low, high = (0, 0, *ends)[-2:]
    return (low + high) // 2


def _gumbel_softmax(
    logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    """Compute gumbel_softmax with all random numbers equal."""
    del eps
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    index = soft.max(dim, keepdim=True)[1]
    return torch.zeros_like(soft).scatter_(dim, index, 1.0) - soft.detach() + soft
