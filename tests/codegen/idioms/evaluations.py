"""Idioms of evaluations: metrics, early stops, rows of their own."""

from __future__ import annotations

from collections.abc import Mapping

from tests.codegen.idioms.outcomes import Idiom, idiom

_ROWS = """

def build_eval_dataset():
    return rows(15, 2)
"""

EVALUATIONS: Mapping[str, Idiom] = {
    "the loss of other rows": idiom(_ROWS),
    "hits for each token": idiom(
        _ROWS
        + """

def metrics(outputs, batch):
    nats = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return {"accuracy": outputs.argmax(-1) == batch["labels"], "perplexity": nats.mean(1).exp()}
"""
    ),
    "hits of what is not ignored": idiom("""
def build_eval_dataset():
    found = rows(15, 2)
    for number, row in enumerate(found):
        row["labels"] = row["labels"].clone()
        row["labels"][: number % 6] = -100
    return found


def metrics(outputs, batch):
    counts = batch["labels"] != -100
    hits = outputs.argmax(-1) == batch["labels"]
    five = (outputs.topk(5, -1).indices == batch["labels"][..., None]).any(-1)
    return {"top 1": hits[counts], "top 5": five[counts]}
"""),
    "metrics of logits beside a loss": idiom(
        """
class Losing(Model):
    def forward(self, ids, labels):
        logits = super().forward(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def build_model():
    return seeded(Losing)


del loss
"""
        + _ROWS
        + """

def metrics(outputs, batch):
    _, logits = outputs
    return {"accuracy": logits.argmax(-1) == batch["labels"], "spread": logits.std(-1)}
"""
    ),
    "dropout, which evaluations leave out": idiom(
        """
class Dropping(Model):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def hidden(self, ids):
        return self.drop(super().hidden(ids)) if self.training else super().hidden(ids)

    def forward(self, ids):
        return self.head(self.drop(self.hidden(ids)))


def build_model():
    return seeded(Dropping)


def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.0)
"""
        + _ROWS,
        compares_losses=False,
    ),
    "running statistics": idiom(
        """
class Normed(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def hidden(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def build_model():
    return seeded(Normed)
"""
        + _ROWS,
        is_whole=True,
    ),
    "an early stop": idiom(
        _ROWS
        + """

def build_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
""",
        options=("--early-stop", "2"),
    ),
    "rows padded by the collate of the training": idiom("""
def build_dataset():
    return [{"tokens": row["ids"][: 3 + n % 4].tolist()} for n, row in enumerate(rows(20, 1))]


def build_eval_dataset():
    return [{"tokens": row["ids"][: 3 + n % 4].tolist()} for n, row in enumerate(rows(9, 2))]


def build_collate():
    def pad(found):
        ids = [torch.tensor(row["tokens"]) for row in found]
        whole = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
        return {"ids": whole[:, :-1], "labels": labels[:, 1:]}

    return pad
"""),
}
