"""Idioms of hooks, and of gradients that a model changes or takes itself."""

from __future__ import annotations

from collections.abc import Mapping

from tests.codegen.idioms.outcomes import Idiom, Outcome, idiom, noted, refused

_OWN = """

def build_model():
    return seeded(Own)
"""
_TENSOR = refused("at most tp=1")
_TAKEN = {
    "ZeRO-3": refused("zero=0 or zero=1 (the model itself takes gradients"),
    "tp": refused("at most tp=1 (the model itself takes gradients"),
    "pp": refused("at most pp=1 (the model itself takes gradients"),
}


def _hooked(*lines: str, more: str = "", otherwise: Mapping[str, Outcome] | None = None) -> Idiom:
    """Return an idiom of a model whose constructor ends in some lines."""
    body = "".join(f"        {line}\n" for line in ("super().__init__()", *lines))
    text = f"\n\nclass Own(Model):\n    def __init__(self):\n{body}{more}{_OWN}"
    return idiom(text, otherwise=otherwise or {})


_KEEPING = """
    def keep(self, module, given, made):
        self.kept["x"] = made

    def forward(self, ids):
        logits = super().forward(ids)
        return logits, self.kept.get("x", torch.zeros(1)).square().mean()


def loss(outputs, batch):
    logits, square = outputs
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + square
"""

HOOKS: Mapping[str, Idiom] = {
    "on what a forward is given": _hooked(
        "self.blocks[1].register_forward_pre_hook(lambda module, given: (given[0] * 0.7,))"
    ),
    "with keywords": _hooked(
        "self.blocks[0].register_forward_hook(self.more, with_kwargs=True)",
        more="\n    def more(self, module, given, named, made):\n        return made * 1.3\n",
    ),
    "of the whole model": _hooked(
        "self.register_forward_hook(lambda module, given, made: made * 1.3)"
    ),
    "adapters (LoRA)": _hooked(
        "for block in self.blocks:",
        "    block.up.a = nn.Linear(WIDTH, 2, bias=False)",
        "    block.up.b = nn.Linear(2, 4 * WIDTH, bias=False)",
        "    block.up.register_forward_hook(self.adapted)",
        more="\n    def adapted(self, module, given, made):\n"
        "        return made + module.b(module.a(given[0]))\n",
    ),
    "a moving mean in a buffer": _hooked(
        "self.register_buffer('mean', torch.zeros(WIDTH))",
        "self.norm.register_forward_hook(self.follow)",
        more="""
    def follow(self, module, given, made):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * module.weight.detach())
        return made - 0.3 * self.mean
""",
    ),
    "what is kept for the model": _hooked(
        "self.kept = {}", "self.blocks[0].register_forward_hook(self.keep)", more=_KEEPING
    ),
    "what is kept for the loss": idiom(
        """
KEPT = []


class Own(Model):
    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_hook(lambda module, given, made: KEPT.append(made))


def loss(outputs, batch):
    square = KEPT.pop().square().mean()
    KEPT.clear()
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()) + square
"""
        + _OWN
    ),
    "a count": idiom(
        """
class Own(Model):
    def __init__(self):
        super().__init__()
        calls = {"n": 0}

        def count(module, given, made):
            calls["n"] += 1
            return made * (1 + 0.1 * calls["n"])

        self.norm.register_forward_hook(count)
"""
        + _OWN,
        every=refused("calls['n']"),
    ),
    "one that takes itself away": _hooked(
        "self.handle = self.norm.register_forward_pre_hook(self.once)",
        more="""
    def once(self, module, given):
        self.handle.remove()
        return (given[0] * 2,)
""",
    ),
    "of a backward": _hooked(
        "self.blocks[0].register_full_backward_hook(lambda module, given, made: (given[0] / 2,))",
        otherwise={"tp": _TENSOR},
    ),
    "before a backward": _hooked(
        "self.blocks[1].register_full_backward_pre_hook(lambda module, given: (given[0] * 2,))",
        otherwise={"tp": _TENSOR},
    ),
    "a bound of a gradient": _hooked(
        more="""
    def hidden(self, ids):
        x = super().hidden(ids)
        x.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        return x
""",
        otherwise={"tp": _TENSOR, "pp": refused("at most pp=1")},
    ),
    "a gradient that is kept to be looked at": _hooked(
        more="""
    def hidden(self, ids):
        x = super().hidden(ids)
        x.retain_grad()
        return x
"""
    ),
    "what a backward needs, kept otherwise": _hooked(
        more="""
    def hidden(self, ids):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return super().hidden(ids)
""",
        otherwise={"tp": _TENSOR, "pp": refused("at most pp=1")},
    ),
}

_PENALISED = """
class Own(Model):
    def forward(self, ids):
        x = self.embed(ids)
        y = x
        for block in self.blocks:
            y = block(y)
        logits = self.head(self.norm(y))
        (gradient,) = torch.autograd.grad(logits.square().{reduced}(), x, create_graph=True)
        return logits, gradient.square().sum(-1).mean()


def loss(outputs, batch):
    logits, penalty = outputs
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.01 * penalty
"""

GRADIENTS: Mapping[str, Idiom] = {
    "a penalty of a gradient": idiom(_PENALISED.format(reduced="sum") + _OWN, otherwise=_TAKEN),
    "a penalty of the gradient of a mean": idiom(
        _PENALISED.format(reduced="mean") + _OWN,
        otherwise={**_TAKEN, "dp": noted("the rows of a batch meet in gradient")},
    ),
    "forces of an energy": idiom(
        """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, positions):
        positions.requires_grad_(True)
        energy = self.net(positions).sum((1, 2))
        ones = torch.ones_like(energy)
        (slope,) = torch.autograd.grad(energy, positions, ones, create_graph=True)
        return energy, -slope


def example_batch(batch_size):
    return {
        "positions": torch.randn(batch_size, 5, 3),
        "energy": torch.randn(batch_size),
        "forces": torch.randn(batch_size, 5, 3),
    }


def build_dataset():
    torch.manual_seed(1)
    whole = example_batch(20)
    return [{key: value[n] for key, value in whole.items()} for n in range(20)]


def loss(outputs, batch):
    energy, forces = outputs
    return F.mse_loss(energy, batch["energy"]) + 10 * F.mse_loss(forces, batch["forces"])


def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.01)
"""
        + _OWN,
        otherwise=_TAKEN,
    ),
    "a gradient that is given on as a number": idiom(
        """
class Own(Model):
    def forward(self, ids):
        x = self.embed(ids)
        y = x
        for block in self.blocks:
            y = block(y)
        logits = self.head(self.norm(y))
        (gradient,) = torch.autograd.grad(logits.square().sum(), x, retain_graph=True)
        return logits + gradient.sum(-1, keepdim=True)
"""
        + _OWN,
        otherwise=_TAKEN,
    ),
    "a function that is derived (torch.func)": idiom(
        """
class Own(Model):
    def forward(self, ids):
        x = self.hidden(ids)
        return self.head(x + torch.func.grad(lambda y: self.head(y).square().sum())(x))
"""
        + _OWN,
        every=refused("torch.autograd.grad(…, create_graph=True)"),
    ),
    "a reversed gradient": idiom(
        """
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Own(Model):
    def __init__(self):
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, ids):
        x = self.hidden(ids)
        return self.head(x), self.domain(Reversed.apply(x.mean(1), 0.3))


def loss(outputs, batch):
    logits, domain = outputs
    words = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return words + F.cross_entropy(domain, batch["labels"][:, 0] % 2)
"""
        + _OWN
    ),
}
