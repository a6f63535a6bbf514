"""Idioms of what lies outside a model, of caches, and of modes that a constructor sets."""

from __future__ import annotations

from collections.abc import Mapping

from tests.codegen.idioms.outcomes import Idiom, idiom, noted, refused

_OWN = """

def build_model():
    return seeded(Own)
"""
_NATS = 'F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())'
_COOLING = """
class Cooling(torch.optim.lr_scheduler.LambdaLR):
    def step(self, *args):
        super().step(*args)
        {cooled}.heat *= 0.5


def build_scheduler(optimizer):
    return Cooling(optimizer, lambda n: 1.0)
"""
_READ = "which the forward or the loss reads"


def _own(body: str, before: str = "", after: str = "", **more: object) -> Idiom:
    return idiom(f"{before}\n\nclass Own(Model):\n{body}{after}{_OWN}", **more)


_LEFT = """
class Own(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(2))

    def forward(self, ids):
        {cleared}
        logits = super().forward(ids)
        return logits, torch.stack([one.square().mean() for one in {kept}]).sum()


def loss(outputs, batch):
    logits, square = outputs
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + square
"""

STATES: Mapping[str, Idiom] = {
    "a temperature that a schedule sets": idiom(
        f"""
class Settings:
    heat = 1.0


def loss(outputs, batch):
    return {_NATS} * Settings.heat

"""
        + _COOLING.format(cooled="Settings"),
        every=refused(_READ),
    ),
    "the batch before": _own(
        """
    def hidden(self, ids):
        x = super().hidden(ids)
        before = LAST.get("mean", torch.zeros(WIDTH))
        LAST["mean"] = x.detach().mean((0, 1))
        return x - 0.1 * before
""",
        before="LAST = {}\n",
        every=refused("LAST['mean']"),
    ),
    "losses that are put down": idiom(f"""
HISTORY, LOG = [], {{}}


def loss(outputs, batch):
    value = {_NATS}
    HISTORY.append(value.detach())
    LOG["loss"], LOG["rows"] = value.detach(), len(outputs)
    return value
"""),
    "a queue in a buffer": _own(
        """
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, WIDTH))

    def hidden(self, ids):
        x = super().hidden(ids)
        old = self.queue.clone()
        self.queue.copy_(torch.cat([x.detach().mean(1), old])[:16])
        return x - 0.1 * old.mean(0)
""",
        every=noted("the rows of a batch meet in copy_"),
    ),
    "a table of a cached function": _own(
        """
    def hidden(self, ids):
        return super().hidden(ids) + table(ids.shape[1])[:, None]
""",
        before="from functools import lru_cache\n\n\n@lru_cache(maxsize=None)\ndef table(n):\n"
        "    return torch.arange(n).float() / n\n",
    ),
    "a weight of a cached function": _own(
        """
    @lru_cache
    def scaled(self):
        return self.norm.weight * 2

    def hidden(self, ids):
        return super().hidden(ids) * self.scaled().detach()
""",
        before="from functools import lru_cache\n",
        every=refused("what a step leaves in Own.scaled"),
    ),
    "masks in a global": _own(
        """
    def hidden(self, ids):
        x = super().hidden(ids)
        return mask(ids.shape[1], ids.device) @ x / ids.shape[1]
""",
        before="MASKS = {}\n\n\ndef mask(n, device):\n    if n not in MASKS:\n"
        "        MASKS[n] = torch.tril(torch.ones(n, n, device=device))\n    return MASKS[n]\n",
    ),
    "a table that is made once": _own("""
    kept = None

    def hidden(self, ids):
        if self.kept is None or self.kept.shape[0] < ids.shape[1]:
            self.kept = torch.linspace(0, 1, ids.shape[1], device=ids.device)
        return super().hidden(ids) + self.kept[: ids.shape[1], None]
"""),
    "what layers leave on themselves": idiom(
        """
class Leaving(Block):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last

"""
        + _LEFT.format(cleared="pass", kept="(block.last for block in self.blocks)")
        + _OWN
    ),
    "what layers leave in a list": idiom(
        """
KEPT = []


class Leaving(Block):
    def forward(self, x):
        KEPT.append(super().forward(x))
        return KEPT[-1]

"""
        + _LEFT.format(cleared="KEPT.clear()", kept="KEPT")
        + _OWN
    ),
}

_DROPPING = """
class Dropping(Block):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.9, self.training))


class Own(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(2))
"""

MODES: Mapping[str, Idiom] = {
    "a part that evaluates and learns": idiom(
        _DROPPING
        + """

def build_model():
    model = seeded(Own)
    model.blocks.eval()
    return model
"""
    ),
    "a frozen part that evaluates": idiom(
        _DROPPING
        + """

def build_model():
    model = seeded(Own)
    model.blocks.eval().requires_grad_(False)
    return model
"""
    ),
    "a batch norm that train() leaves alone": idiom(
        """
class Own(Model):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.batch_norm.running_mean.fill_(0.1)

    def train(self, mode=True):
        super().train(mode)
        self.batch_norm.eval()
        return self

    def hidden(self, ids):
        return self.batch_norm(super().hidden(ids).transpose(1, 2)).transpose(1, 2)


def build_model():
    return seeded(Own).train()
"""
    ),
    "a dropout that is off": _own("""
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.drop.eval()

    def hidden(self, ids):
        return self.drop(super().hidden(ids))
"""),
    "a whole model that evaluates": idiom(
        """
def build_model():
    return seeded(Model).eval()
""",
        every=refused("return seeded(Model).train()"),
    ),
    "a part that the forward sets": idiom(
        _DROPPING
        + """
    def hidden(self, ids):
        self.blocks.eval()
        return super().hidden(ids)
"""
        + _OWN,
        otherwise={"pp": refused("blocks.0.eval()")},
    ),
}
