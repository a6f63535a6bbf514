"""Layers that keep what they save on the host train alike, and leave the device's memory free."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.model.parts import compile_layers
from autopar.runtime.ranks.transport import HostLink
from autopar.runtime.recompute.on_host import save_on_host
from autopar.runtime.recompute.running_again import recompute, recomputes

CPU = torch.device("cpu")
WIDTH, ROWS = 32, 64


class Block(nn.Module):
    """Attends, drops and adds; its products read views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x) * scale).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v.sigmoid())
        dropped = nn.functional.dropout(self.out(attended), 0.3)
        return torch.as_tensor(torch.relu(x + dropped))


class Model(nn.Module):
    """Blocks that share a tensor, and a head."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, ROWS * WIDTH).to(x).view(ROWS, WIDTH).cos()
        for block in self.blocks:
            x = block(x, scale)
        return torch.as_tensor(self.head(x).square().mean())


def made(blocks: int = 4) -> Model:
    torch.manual_seed(0)
    return Model(blocks).double()


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)


def gradients(model: Model, order: Sequence[int]) -> list[Tensor]:
    """Return the gradients after forwards (microbatch n) and backwards (~n) in an order."""
    losses: dict[int, Tensor] = {}
    for one in order:
        torch.manual_seed(max(one, 0))
        if one >= 0:
            losses[one] = model(batch(one).to(model.head.weight.device))
        else:
            losses.pop(~one).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


ORDERS = {
    "one after another": (0, ~0, 1, ~1),
    "all forwards first": (0, 1, 2, ~0, ~1, ~2),
    "one forward, one backward": (0, 1, ~0, 2, ~1, 3, ~2, ~3),
    "the last one first": (0, 1, ~1, ~0),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("blocks", [(0, 1, 2, 3), (1, 2), (0, 2)])
def test_microbatches_in_any_order_give_the_gradients_of_layers_that_save_on_the_device(
    order: Sequence[int], blocks: Sequence[int]
) -> None:
    plain, there = made(), made()
    save_on_host([there.blocks[place] for place in blocks], CPU)
    for own, same in zip(gradients(there, order), gradients(plain, order), strict=True):
        assert torch.equal(own, same)


class LateCopies:
    """Copies as late as a device may make them: when computing waits for them, each way in turn."""

    def __init__(self) -> None:
        self.to_do: dict[bool, list[tuple[Tensor, Tensor]]] = {False: [], True: []}
        self.homes: set[int] = set()
        self.done = {False: 0, True: 0}

    def copy(self, _: HostLink, source: Tensor, target: Tensor) -> None:
        comes_back = source.data_ptr() in self.homes
        if not comes_back:
            self.homes.add(target.data_ptr())
        elif target.is_floating_point():
            target.fill_(torch.nan)  # what a kernel would read that does not wait
        self.to_do[comes_back].append((source, target))

    def mark(self, _: HostLink, *, comes_back: bool) -> tuple[bool, int]:
        return comes_back, len(self.to_do[comes_back])

    def join(self, _: HostLink, end: tuple[bool, int] | None) -> None:
        if end is not None:
            way, until = end
            for source, target in self.to_do[way][self.done[way] : until]:
                target.copy_(source)
            self.done[way] = max(self.done[way], until)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_kernels_wait_for_copies_that_a_device_makes_late(order: Sequence[int]) -> None:
    plain, there, late = made(), made(), LateCopies()
    save_on_host(list(there.blocks), CPU)
    names = ("copy", "mark", "join")
    with ExitStack() as stack:
        for name in names:
            method = getattr(late, name)
            stack.enter_context(patch.object(HostLink, name, partialmethod(_call, method)))
        for _ in range(2):  # the second step uses memory of the first
            for model in (plain, there):
                model.zero_grad()
            pairs = zip(gradients(there, order), gradients(plain, order), strict=True)
            assert all(torch.equal(own, same) for own, same in pairs)
    assert late.done[True] > 0


def _call(link: HostLink, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return method(link, *args, **kwargs)


def test_compiled_and_recomputed_layers_save_on_the_host_alike() -> None:
    plain, there = made(), made()
    compile_layers(there, ["blocks.0", "blocks.1"])
    recompute(there.blocks[2], "full")
    save_on_host(list(there.blocks)[:3], CPU)
    for own, same in zip(gradients(there, (0, ~0)), gradients(plain, (0, ~0)), strict=True):
        assert torch.allclose(own, same, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_recomputed_layers_get_their_inputs_back_from_the_host(order: Sequence[int]) -> None:
    plain, there = made(), made()
    for block in there.blocks:
        recompute(block, "full")
    save_on_host(list(there.blocks), CPU)
    for own, same in zip(gradients(there, order), gradients(plain, order), strict=True):
        assert torch.equal(own, same)


class Watched:
    """The saved tensors that are on the device, and the memory that the host has given."""

    def __init__(self) -> None:
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.given: list[int] = []
        self.homes: list[weakref.ref[torch.UntypedStorage]] = []

    def bytes_on_host(self) -> int:
        return sum(own.nbytes() for one in self.homes if (own := one()) is not None)

    def bytes_on_device(self) -> int:
        living = {id(own): own for one in self.storages.values() if (own := one()) is not None}
        return sum(one.nbytes() for one in living.values())


@pytest.fixture
def watched() -> Iterator[Watched]:
    found, copied, empty = Watched(), HostLink.copy, HostLink.empty

    def copy(link: HostLink, source: Tensor, target: Tensor) -> None:
        for one in (source, target):
            if one.data_ptr() not in found.given:
                storage = one.untyped_storage()
                found.storages[storage._cdata] = weakref.ref(storage)
        copied(link, source, target)

    def given(link: HostLink, elements: int, dtype: torch.dtype) -> Tensor:
        memory = empty(link, elements, dtype)
        found.given.append(memory.data_ptr())
        found.homes.append(weakref.ref(memory.untyped_storage()))
        return memory

    with patch.object(HostLink, "copy", copy), patch.object(HostLink, "empty", given):
        yield found


def most_on_device(model: Model, watched: Watched) -> int:
    """Return the most bytes of saved tensors on the device before a layer or behind it."""
    sizes = [0]

    def note(*_: object) -> None:
        sizes.append(watched.bytes_on_device())

    for block in model.blocks:
        block.register_forward_hook(note)
        block.register_full_backward_pre_hook(note)
    gradients(model, (0, ~0))
    return max(sizes)


def test_the_device_holds_the_tensors_of_two_layers_however_many_there_are(
    watched: Watched,
) -> None:
    few, many = made(3), made(9)
    for model in (few, many):
        save_on_host(list(model.blocks), CPU)
    of_few, of_many = most_on_device(few, watched), most_on_device(many, watched)
    assert of_few == of_many > 0
    assert watched.bytes_on_device() == 0  # after the backward


class NamedInputs(Model):
    """Gives its blocks their inputs by name."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(ROWS, WIDTH, dtype=x.dtype)
        for block in self.blocks:
            x = block(x=x, scale=scale)
        return torch.as_tensor(self.head(x).square().mean())


class Carried(Model):
    """Gives its blocks a list with their input, which they may change."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(ROWS, WIDTH, dtype=x.dtype)
        for block in self.blocks:
            (x,) = block([x], scale)
        return torch.as_tensor(self.head(x).square().mean())


class CarryingBlock(Block):
    def forward(self, x: list[Tensor], scale: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [super().forward(x.pop(), scale)]


@pytest.mark.parametrize("kind", [Model, NamedInputs, Carried])
def test_the_device_holds_the_inputs_of_two_recomputed_layers(
    kind: type[Model], watched: Watched
) -> None:
    sizes = []
    for blocks in (3, 9):
        torch.manual_seed(0)
        model = kind(blocks).double()
        if kind is Carried:
            model.blocks = nn.ModuleList(CarryingBlock() for _ in range(blocks)).double()
        for block in model.blocks:
            recompute(block, "full")
        save_on_host(list(model.blocks), CPU)
        sizes.append(most_on_device(model, watched))
    of_one = 2 * ROWS * WIDTH * 8  # rows of the batch, in float64
    assert of_one <= sizes[0] == sizes[1] < 4 * of_one
    assert len(watched.given) >= 3 + 9  # each layer's input


def test_the_last_layer_stays_on_the_device_if_its_backward_is_next(watched: Watched) -> None:
    alone, two = made(), made()
    save_on_host(list(alone.blocks)[3:], CPU)
    gradients(alone, (0, ~0, 1, ~1))
    assert not watched.given
    save_on_host(list(two.blocks)[2:], CPU)
    gradients(two, (0, ~0))
    of_a_layer = len(watched.given)
    gradients(two, (0, ~0, 1, ~1))
    assert len(watched.given) == of_a_layer > 0
    gradients(two, (0, 1, ~1, ~0))  # three runs go to the host, and one stays
    assert len(watched.given) > 2 * of_a_layer


def test_later_steps_use_the_memory_of_the_host_again(watched: Watched) -> None:
    model = made()
    save_on_host(list(model.blocks), CPU)
    gradients(model, (0, 1, ~0, ~1))
    first = len(watched.given)
    gradients(model, (0, 1, ~0, ~1, 2, ~2))
    assert len(watched.given) == first > 0


def test_rows_of_other_lengths_do_not_add_up_in_the_memory_of_the_host(watched: Watched) -> None:
    model, sizes = made(), []
    save_on_host(list(model.blocks), CPU)
    for rows in (9, 2, 3, 4, 5, 6, 7, 8):
        model(torch.ones(rows, ROWS, WIDTH, dtype=torch.float64)).backward()
        sizes.append(watched.bytes_on_host())
    assert max(sizes) == sizes[0] > 0


def test_parameters_and_what_many_layers_save_stay_on_the_device(watched: Watched) -> None:
    model = made()
    save_on_host(list(model.blocks), CPU)
    loss = model(batch(0))
    own = {one.untyped_storage()._cdata for one in model.parameters()}
    assert own.isdisjoint(watched.storages)
    shared = ROWS * WIDTH * 8
    sizes = [storage.nbytes() for one in watched.storages.values() if (storage := one())]
    assert sizes.count(shared) <= 1  # copied by the first layer, for it and the next one
    loss.backward()


def test_a_forward_without_gradients_copies_nothing(watched: Watched) -> None:
    model = made()
    save_on_host(list(model.blocks), CPU)
    with torch.no_grad():
        model(batch(0))
    assert not watched.given


def test_a_part_of_a_large_tensor_stays_so_that_the_rest_is_not_copied(watched: Watched) -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(x[:4].square())

    layer, rows = Picks(), torch.randn(64, 128, requires_grad=True)
    save_on_host([layer], CPU)
    torch.stack([layer(rows), layer(rows)]).sum().backward()  # type: ignore[no-untyped-call]
    assert not watched.given
    torch.stack([layer(rows[:16].exp()), layer(rows)]).sum().backward()  # type: ignore[no-untyped-call]
    assert watched.given


def test_backwards_of_such_layers_are_not_split() -> None:
    model = made()
    assert not recomputes(model)
    save_on_host(list(model.blocks)[:1], CPU)
    assert recomputes(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_gpu_gets_the_same_tensors_back(order: Sequence[int]) -> None:
    plain, there = made(8).cuda(), made(8).cuda()
    save_on_host(list(there.blocks), torch.device("cuda", torch.cuda.current_device()))
    for _ in range(20):  # copies and kernels run beside each other, in another order each time
        for model in (plain, there):
            model.zero_grad()
        pairs = zip(gradients(there, order), gradients(plain, order), strict=True)
        assert all(torch.equal(own, same) for own, same in pairs)
