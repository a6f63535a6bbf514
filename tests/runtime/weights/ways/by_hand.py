"""Models that are filled by loops, initialisers and copies."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters

from tests.runtime.weights.ways.small import Net, state


def counted(model: nn.Module) -> nn.Module:
    """Give every parameter other numbers, none of them drawn."""
    model.load_state_dict(state(model))
    return model


def _loop(fill: Callable[[Tensor], Any], kind: type[nn.Module] = nn.Linear) -> Any:
    def build(_: Path) -> nn.Module:
        model = Net()
        for module in model.modules():
            if isinstance(module, kind):
                for parameter in module.parameters():
                    fill(parameter)
        return model

    return build


def _applied(_: Path) -> nn.Module:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    return Net().apply(fill)


def _from_meta(_: Path) -> nn.Module:
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    model.angles = torch.ones(4) / 3
    return counted(model)


def _from_meta_by_initialisers(_: Path) -> nn.Module:
    model = nn.Linear(6, 8, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


def _from_meta_by_assigning(_: Path) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    model.load_state_dict(state(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))), assign=True)
    return model


def _meta_asks(_: Path) -> nn.Module:
    """Fill what says that it is on meta, as libraries do."""
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3))
    for place, module in enumerate(model):
        assert isinstance(module, nn.Linear)
        if module.weight.is_meta:
            weight = torch.zeros_like(module.weight, device="cpu") + 2
            module.weight = nn.Parameter(weight)
            module.bias = nn.Parameter(torch.full_like(module.bias, place, device="cpu"))
        else:
            nn.init.constant_(module.weight, 5)
            nn.init.constant_(module.bias, 6)
    return model


def _data_assigned(_: Path) -> nn.Module:
    model = counted(Net())
    model.get_parameter("first.weight").data = torch.ones(8, 6) * 3
    model.get_parameter("first.bias").data = torch.tensor([float(n) for n in range(8)])
    model.get_parameter("second.weight").data.mul_(2)
    model.get_parameter("second.bias").data[1:3] = 7
    return model


def _data_shared(_: Path) -> nn.Module:
    """Change a tensor after it has become the data of a parameter."""
    model = counted(Net())
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model.get_parameter("second.bias").data = numbers
    numbers.mul_(10)
    return model


def _set(_: Path) -> nn.Module:
    model = counted(Net())
    own: dict[str, Any] = dict(model.named_parameters())
    with torch.no_grad():
        own["second.bias"].set_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
        own["first.bias"].set_(torch.arange(16.0)[::2].clone())
        numbers = torch.linspace(0, 1, 32)
        own["second.weight"].set_(numbers.untyped_storage(), 0, (4, 8), (8, 1))
    return model


def _as_vector(_: Path) -> nn.Module:
    model = counted(Net())
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.5 + 1, model.parameters())
    return model


def _moved_nowhere(_: Path) -> nn.Module:
    """Write to what `to` and `cpu` return, which is the tensor itself."""
    model = counted(Net().to("cpu").cpu())
    for name in ("angles", "mask"):
        model.get_buffer(name).to(torch.device("cpu")).cpu().to("cpu", torch.float32)[0] = 9
        model.get_buffer(name).to(model.get_buffer("angles")).type(torch.float32)[1] = 8
    model.get_buffer("angles").to("cpu", copy=True).zero_()
    model.get_buffer("angles").to(torch.float64).zero_()
    return model


def _halved(_: Path) -> nn.Module:
    model = counted(Net()).to(torch.bfloat16)
    model.get_submodule("norm").float()
    model.get_submodule("first").half()
    return model


def _indexed(_: Path) -> nn.Module:
    model = counted(Net())
    weight, chosen = model.get_parameter("first.weight"), torch.tensor([0, 2])
    with torch.no_grad():
        weight[chosen] = 1.5
        weight[torch.tensor([True] + 7 * [False])] = torch.arange(6.0)
        weight[:, [1, 3]] *= 2
        weight[weight > 0.9] = 0.0
        weight[3, 4] = torch.tensor(11.0)
        weight[torch.arange(8).flip(0)[:1], 0] = weight[1, 1]
        weight.copy_(torch.where(weight < -0.9, 1.0, weight))
        model.get_parameter("second.weight").masked_fill_(torch.eye(4, 8).bool(), -1)
    return model


def _by_numbers(_: Path) -> nn.Module:
    """Decide by numbers of tensors, as loops and conditions in constructors do."""
    model = counted(Net())
    rates = torch.linspace(0, 1, 3)
    for rate in rates:
        if rate.item() > 0.4 and bool(rate < 2):
            model.get_parameter("second.bias").data += float(rate) * len(rates)
    largest = int(model.get_parameter("first.weight").argmax())
    model.get_parameter("first.bias").data[0] = largest
    model.name = f"{rates.mean():.2f}"  # type: ignore[assignment]
    if torch.equal(rates, rates.clone()) and rates.any():
        model.get_parameter("first.bias").data[1] = torch.tensor([rates[1], 2.0])[0]
    return model


def _factored(_: Path) -> nn.Module:
    """Split a weight by its singular values, as adapters that start from those do."""
    model = counted(Net())
    left, values, right = torch.linalg.svd(model.get_parameter("first.weight").detach())
    model.low = nn.Parameter((left[:, :2] * values[:2]).contiguous())
    model.high = nn.Parameter(right[:2].contiguous())
    with torch.no_grad():
        model.get_parameter("first.weight").sub_(model.low @ model.high)
    return model


def _copied(_: Path) -> nn.Module:
    block = nn.Sequential(counted(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    first, second, third = (copy.deepcopy(block) for _ in range(3))
    nn.init.ones_(second.get_parameter("0.weight"))
    third.load_state_dict(second.state_dict())
    return nn.ModuleList([first, second, third])


def _two_nets(_: Path) -> nn.Module:
    net = counted(Net())
    target = copy.deepcopy(net).requires_grad_(False)
    net.get_parameter("first.bias").data.fill_(3)
    return nn.ModuleDict({"net": net, "target": target})


def _tied(_: Path) -> nn.Module:
    into, out = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
    out.weight = into.weight
    model = counted(nn.ModuleDict({"into": into, "out": out}))
    with torch.no_grad():
        out.weight[0] = 0
    return model


def _initialised(_: Path) -> nn.Module:
    model = nn.ParameterDict(
        {
            "eye": torch.empty(3, 5),
            "dirac": torch.empty(4, 2, 3),
            "ones": torch.empty(2),
            "constant": torch.empty(2),
        }
    )
    nn.init.eye_(model["eye"])
    nn.init.dirac_(model["dirac"])
    nn.init.ones_(model["ones"])
    nn.init.constant_(model["constant"], 0.3)
    return model


def _drawn_by_initialisers(_: Path) -> nn.Module:
    model = nn.ParameterDict({name: torch.empty(8, 6) for name in "abcdefgh"})
    nn.init.orthogonal_(model["a"])
    nn.init.sparse_(model["b"], sparsity=0.5)
    nn.init.xavier_uniform_(model["c"])
    nn.init.xavier_normal_(model["d"])
    nn.init.kaiming_normal_(model["e"])
    nn.init.trunc_normal_(model["f"], 0, 1, -0.5, 0.5)
    nn.init.trunc_normal_(model["g"], 3, 1, -0.5, 0.5)
    with torch.no_grad():
        model["h"].exponential_().log_().clamp_(min=-2)
    return model


def _complex(_: Path) -> nn.Module:
    model = counted(nn.Linear(2, 2))
    angles = torch.outer(torch.arange(4), 1 / 10 ** (torch.arange(0, 4, 2) / 4))
    model.register_buffer("turned", torch.polar(torch.ones_like(angles), angles))
    model.register_buffer("back", torch.view_as_real(model.get_buffer("turned")))
    return model


def _in_parts(_: Path) -> Any:
    """Draw into parts of one weight: rows, columns, gates of a recurrent layer."""
    model: Any = nn.LSTM(3, 4)
    for part in model.weight_ih_l0.detach().chunk(4):
        nn.init.orthogonal_(part)
    for part in model.weight_hh_l0.detach().chunk(2, dim=1):
        nn.init.normal_(part)
    model.bias_ih_l0.data[4:8].fill_(1.0)
    return model


def _averaged(_: Path) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(counted(nn.Linear(3, 3)))


def _addresses(_: Path) -> nn.Module:
    """Find tied weights by where they lie."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = counted(nn.Sequential(first, second))
    own = {one.data_ptr() for one in (first.weight, second.weight, first.bias, second.bias)}
    model.count = len(own)  # type: ignore[assignment]
    return model


def _given_rows(_: Path) -> nn.Module:
    made: Any = nn.Embedding.from_pretrained
    model: nn.Module = made(torch.arange(12.0).reshape(4, 3), freeze=False, padding_idx=0)
    return model


def _skipped(_: Path) -> nn.Module:
    layer: nn.Module = nn.utils.skip_init(nn.Linear, 4, 4)  # type: ignore[no-untyped-call]
    return counted(layer)


def _lazy(_: Path) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(5))
    with torch.no_grad():
        model(torch.zeros(1, 1, 6, 6))
    return model


def _parametrized(_: Path) -> nn.Module:
    first = parametrizations.weight_norm(counted(nn.Linear(4, 4)))
    return nn.Sequential(first, parametrizations.orthogonal(counted(nn.Linear(4, 4))))


CERTAIN = {
    "an embedding of given rows": _given_rows,
    "complex tables": _complex,
    "averaged": _averaged,
    "addresses compared": _addresses,
    "initialisers that draw nothing": _initialised,
    "to_empty of a model on meta": _from_meta,
    "assigned to a model on meta": _from_meta_by_assigning,
    "only what is on meta": _meta_asks,
    "data assigned": _data_assigned,
    "data that is changed later": _data_shared,
    "set_": _set,
    "one vector for all": _as_vector,
    "moved to where it is": _moved_nowhere,
    "cast": _halved,
    "indexed": _indexed,
    "by numbers that are read": _by_numbers,
    "singular values": _factored,
    "deep copies": _copied,
    "a net and its target": _two_nets,
    "tied": _tied,
    "skip_init and then numbers": _skipped,
    "parametrized": _parametrized,
}
DRAWN = {
    "as constructed": lambda _: Net(),
    "a loop of initialisers": _loop(lambda p: nn.init.normal_(p, std=0.02)),
    "a loop of uniform draws": _loop(lambda p: p.data.uniform_(-0.1, 0.1)),
    "apply": _applied,
    "initialisers after to_empty": _from_meta_by_initialisers,
    "every initialiser": _drawn_by_initialisers,
    "in parts": _in_parts,
    "a lazy layer": _lazy,
    "layers of torch's transformer": lambda _: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2
    ),
    "recurrent": lambda _: nn.LSTM(4, 4, 2),
}
