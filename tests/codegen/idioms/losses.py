"""Idioms of losses: where they stand, what they average, and what they add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.codegen.idioms.outcomes import Idiom, idiom, noted, refused

_FLAT = "outputs.flatten(0, 1), batch['labels'].flatten()"

_NEARLY = noted("makes the loss a mean over rows only nearly")


def _weighed(made: str, **more: Any) -> Idiom:
    """Return an idiom of a mean that a loss makes by hand, with two weights for each target."""
    return idiom(
        f"""
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    w, v = torch.rand(2, batch_size, LENGTH)
    return {{"ids": ids[:, :-1], "labels": ids[:, 1:], "w": w, "v": v}}


def build_dataset():
    numbers, found = torch.Generator().manual_seed(3), rows(20, 1)
    for n, row in enumerate(found):
        row["w"] = torch.rand(LENGTH, generator=numbers) * 0.3 * (n % 3)
        row["v"] = torch.rand(LENGTH, generator=numbers) * (1 + n % 4)
    return found


def loss(outputs, batch):
    w, v = batch["w"], batch["v"]
    each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return {made}
""",
        **more,
    )


LOSSES: Mapping[str, Idiom] = {
    "divided by a sum of two": _weighed("(each * w).sum() / (2 * w.sum() + 0.5 * v.sum() + 1)"),
    "divided by the larger of two": _weighed("(each * w).sum() / torch.maximum(w.sum(), v.sum())"),
    "divided by a choice": _weighed(
        "(each * w).sum() / torch.where(w.sum() > 3, w.sum(), torch.ones(()))"
    ),
    "divided by max() of Python": _weighed("(each * w).sum() / max(w.sum(), 1)"),
    "divided by a norm": _weighed("(each * v).sum() / v.square().sum().sqrt()"),
    "a mean divided by a mean": _weighed("(each * w).mean() / w.mean()"),
    "a mean divided by a bounded mean": _weighed("(each * w).mean() / w.mean().clamp(min=0.4)"),
    "two divided means": _weighed(
        "(each * w).sum() / w.sum().clamp(min=3) + 0.5 * (each * v).sum() / (v.sum() + 1)"
    ),
    "two sums divided by one number": _weighed(
        "((each * w).sum() + 0.1 * outputs.square().sum()) / w.sum().clamp(min=1)"
    ),
    "a divided mean of each row": _weighed("((each * w).sum(1) / w.sum(1).clamp(min=0.5)).mean()"),
    "a mean beside a divided one": _weighed("each.mean() + (each * w).sum() / w.sum()"),
    "divided twice": _weighed("(each * w).sum() / w.sum() / v.sum()", every=_NEARLY),
    "loss of the model, alone": idiom("""
class Losing(Model):
    def forward(self, ids, labels):
        return F.cross_entropy(super().forward(ids).flatten(0, 1), labels.flatten())


def build_model():
    return seeded(Losing)


del loss
"""),
    "loss in a dict": idiom("""
class Losing(Model):
    def forward(self, ids, labels=None):
        logits = super().forward(ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, WORDS), labels.reshape(-1))
        return {"loss": loss, "logits": logits}


def build_model():
    return seeded(Losing)


del loss
"""),
    "a loss module": idiom("""
criterion = nn.CrossEntropyLoss(ignore_index=3)


def loss(outputs, batch):
    return criterion(outputs.permute(0, 2, 1), batch["labels"])
"""),
    "label smoothing": idiom(f"""
def loss(outputs, batch):
    return F.cross_entropy({_FLAT}, label_smoothing=0.1)
"""),
    "weights of classes": idiom(f"""
weights = torch.linspace(0.5, 2.0, WORDS)


def loss(outputs, batch):
    return F.cross_entropy({_FLAT}, weight=weights.to(outputs.device))
"""),
    "a weighted mean with a least weight": idiom("""
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "weight": torch.rand(batch_size, LENGTH)}


def build_dataset():
    numbers = torch.Generator().manual_seed(3)
    return [{**row, "weight": torch.rand(LENGTH, generator=numbers) * 0.2} for row in rows(20, 1)]


def loss(outputs, batch):
    each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return (each * batch["weight"]).sum() / batch["weight"].sum().clamp(min=1)
"""),
    "a masked mean by hand": idiom("""
def loss(outputs, batch):
    mask = (batch["labels"] > 4).float()
    nats = -outputs.log_softmax(-1).gather(2, batch["labels"][..., None])[..., 0]
    return (nats * mask).sum() / (mask.sum() + 1e-8)
"""),
    "a mean over what a mask picks": idiom("""
def loss(outputs, batch):
    mask = batch["labels"] > 4
    return F.cross_entropy(outputs[mask], batch["labels"][mask])
"""),
    "a sum": idiom(f"""
def loss(outputs, batch):
    return F.cross_entropy({_FLAT}, reduction="sum") / 100
"""),
    "a mean of means of rows": idiom("""
def loss(outputs, batch):
    each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return each.mean(1).mean()
"""),
    "two heads": idiom("""
class Two(Model):
    def __init__(self):
        super().__init__()
        self.length = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        hidden = self.hidden(ids)
        return {"logits": self.head(hidden), "length": self.length(hidden[:, -1])[:, 0]}


def build_model():
    return seeded(Two)


def loss(outputs, batch):
    words = F.cross_entropy(outputs["logits"].flatten(0, 1), batch["labels"].flatten())
    lengths = F.smooth_l1_loss(outputs["length"], batch["labels"][:, 0].float() / WORDS)
    return words + 0.5 * lengths
"""),
    "an auxiliary loss of the forward": idiom("""
class Gated(Model):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        hidden = self.hidden(ids)
        self.aux = self.gate(hidden).logsumexp(-1).square().mean()
        return self.head(hidden), self.aux


def build_model():
    return seeded(Gated)


def loss(outputs, batch):
    logits, aux = outputs
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.01 * aux
"""),
    "alignments (CTC)": idiom("""
def loss(outputs, batch):
    scores = outputs.log_softmax(-1).transpose(0, 1)
    targets = batch["labels"][:, :2].clamp(min=1)
    times = torch.full((outputs.shape[0],), LENGTH, dtype=torch.long)
    return F.ctc_loss(scores, targets, times, torch.full_like(times, 2))
"""),
    "a divergence from a teacher's numbers": idiom("""
def loss(outputs, batch):
    wanted = F.one_hot(batch["labels"], WORDS).float() * 0.8 + 0.2 / WORDS
    return F.kl_div(outputs.log_softmax(-1), wanted, reduction="sum") / wanted[..., 0].numel()
"""),
    "true or false with weights": idiom("""
def loss(outputs, batch):
    wanted = F.one_hot(batch["labels"], WORDS).to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, wanted, pos_weight=outputs.new_tensor(3.0))
"""),
    "focal": idiom("""
def loss(outputs, batch):
    nats = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return ((1 - torch.exp(-nats)) ** 2 * nats).mean()
"""),
    "negative log likelihood": idiom("""
def loss(outputs, batch):
    return F.nll_loss(F.log_softmax(outputs, -1).flatten(0, 1), batch["labels"].flatten())
"""),
    "a penalty on weights": idiom("""
class Penalised(Model):
    def forward(self, ids):
        return super().forward(ids), self.head.weight.square().sum()


def build_model():
    return seeded(Penalised)


def loss(outputs, batch):
    logits, penalty = outputs
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 1e-2 * penalty
"""),
    "a penalty that finds the model in a global": idiom(
        """
MADE = []


def build_model():
    MADE[:] = [seeded(Model)]
    return MADE[0]


def loss(outputs, batch):
    penalty = sum(one.abs().sum() for one in MADE[0].parameters())
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()) + 1e-2 * penalty
""",
        every=refused("the loss reads words.weight of the model, which is no output"),
    ),
    "pairs of rows": idiom(
        """
def loss(outputs, batch):
    one = F.normalize(outputs.mean(1), dim=-1)
    return F.cross_entropy(one @ one.detach().T * 5, torch.arange(len(one), device=one.device))
""",
        is_whole=True,
        otherwise={way: noted("rows of a batch meet") for way in ("dp", "ZeRO-3")},
    ),
    "scores that a backward alone reads": idiom(
        """
class Pulled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, scores):
        ctx.save_for_backward(scores)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        scores, = ctx.saved_tensors
        largest, places = scores.max(-1, keepdim=True)
        return gradient, torch.zeros_like(scores).scatter(-1, places, largest / largest.numel())


def loss(outputs, batch):
    mean = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
    return Pulled.apply(mean, outputs)
""",
        is_whole=True,
        otherwise={way: noted("rows of a batch meet") for way in ("dp", "ZeRO-3")},
    ),
    "a loss that shifts its targets": idiom("""
def loss(outputs, batch):
    logits, labels = outputs[:, :-1].contiguous(), batch["labels"][:, 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
"""),
}
