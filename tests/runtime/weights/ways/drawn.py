"""Models that draw numbers, seeded by themselves or not."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.runtime.weights.ways.small import Net


class _Features(nn.Module):
    """Fixed random features that are no part of the state, beside a layer."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("features", features, persistent=False)


def _seeded(_: Path) -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(Net(), nn.Dropout(0.1), nn.Linear(4, 4))


def _seeded_in_the_middle(_: Path) -> nn.Module:
    nn.Linear(3, 3)
    torch.manual_seed(3)
    layer = nn.Linear(3, 3)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    torch.seed()
    torch.manual_seed(4)
    return nn.Sequential(layer, nn.Linear(3, 3))


def _two_nets_of_one_seed(_: Path) -> nn.Module:
    nets = []
    for _name in ("policy", "reference"):
        torch.manual_seed(5)
        nets.append(Net())
    return nn.ModuleList(nets)


def _by_a_generator(_: Path) -> Any:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(4, 3, generator=generator)
    order = torch.randperm(4, generator=generator)
    model: Any = _Features(features[order])
    nn.init.normal_(model.scale, generator=generator)
    model.kept = nn.init.trunc_normal_(torch.empty(3), generator=generator)
    model.generator = generator
    model.next = torch.rand(2, generator=generator)
    return model


def _forked(_: Path) -> nn.Module:
    torch.manual_seed(2)
    first = nn.Linear(2, 2)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        mask = torch.rand(3, 3) > 0.5
    return nn.ModuleList([first, nn.Linear(2, 2), _Features(mask.float())])


def _state_kept(_: Path) -> nn.Module:
    torch.manual_seed(2)
    state = torch.get_rng_state()
    first = nn.Linear(2, 2)
    torch.set_rng_state(state)
    return nn.ModuleList([first, nn.Linear(2, 2)])


def _shuffled(_: Path) -> Any:
    torch.manual_seed(0)
    order = torch.randperm(6)
    chosen = torch.multinomial(torch.arange(1.0, 7), 3)
    model: Any = _Features(torch.arange(6)[order])
    model.chosen = chosen
    model.times = [int(number) for number in torch.randint(0, 9, (3,))]
    return model


def _foreign(_: Path) -> nn.Module:
    random.seed(1)
    np.random.seed(2)
    own, numbers = random.Random(3), np.random.default_rng(4)
    drawn = [random.random(), float(np.random.rand()), own.random(), float(numbers.random())]
    model = _Features(torch.tensor(drawn))
    model.scale = nn.Parameter(torch.from_numpy(numbers.standard_normal(3)).float())
    return model


def _distributions(_: Path) -> nn.Module:
    torch.manual_seed(1)
    normal = torch.distributions.Normal(0.0, 1.0).sample((3,))  # type: ignore[no-untyped-call]
    coins = torch.bernoulli(torch.tensor([0.5, 0.2, 0.8]))
    gumbel = nn.functional.gumbel_softmax(torch.ones(3))
    kept = nn.functional.dropout(torch.ones(3))
    return _Features(torch.stack([normal, coins, gumbel, kept, torch.randn(3)]))


def _state_asked_for(_: Path) -> Any:
    torch.manual_seed(5)
    model: Any = _Features(torch.randn(3))
    model.seed, model.state = torch.initial_seed(), torch.get_rng_state()
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    model.same = [torch.rand(2, generator=generator), torch.rand(2)]
    return model


def _nearest(_: Path) -> nn.Module:
    """Move three centres to the means of what is nearest to them."""
    torch.manual_seed(0)
    points = torch.randn(30, 2)
    centres = points[:3].clone()
    for _step in range(4):
        nearest = torch.cdist(points, centres).argmin(1)
        for place in range(3):
            if (nearest == place).any():
                centres[place] = points[nearest == place].mean(0)
    return _Features(centres)


def _run_once(_: Path) -> nn.Module:
    """Scale a layer by what a batch makes of it; batch norms see that batch, too."""
    torch.manual_seed(0)
    last = nn.Linear(8, 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), last)
    with torch.no_grad():
        last.weight.data /= model(torch.randn(16, 4)).std(0).unsqueeze(1)
    return model


def _trained_a_little(_: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _step in range(3):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _unseeded_state(_: Path) -> nn.Module:
    state = torch.get_rng_state()
    first = nn.Linear(2, 2)
    torch.set_rng_state(state)
    same = nn.Linear(2, 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = nn.Linear(2, 2)
    return nn.ModuleList([first, same, other, nn.Linear(2, 2)])


def _into_real(_: Path) -> nn.Module:
    """Draw into tensors that come from elsewhere."""
    real: Any = torch.tensor([1.0, 2.0, 3.0])
    nn.init.normal_(real)
    model = _Features(real)
    return nn.ModuleList([model, nn.Linear(2, 2)])


def _until_it_fits(_: Path) -> nn.Module:
    drawn = torch.randn(4)
    while drawn.abs().max() > 1:
        drawn.normal_()
    return nn.ModuleList([_Features(drawn), nn.Linear(2, 2)])


CERTAIN = {
    "seeded": _seeded,
    "seeded in the middle": _seeded_in_the_middle,
    "two nets of one seed": _two_nets_of_one_seed,
    "a generator": _by_a_generator,
    "forked": _forked,
    "a state that is set back": _state_kept,
    "shuffled": _shuffled,
    "numbers of Python and numpy": _foreign,
    "distributions": _distributions,
    "a state that is asked for": _state_asked_for,
    "centres of points": _nearest,
    "run once": _run_once,
    "trained a little": _trained_a_little,
}
DRAWN = {
    "a state without a seed": _unseeded_state,
    "drawn into real tensors": _into_real,
    "drawn until it fits": _until_it_fits,
}
