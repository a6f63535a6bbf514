"""Idioms of what a batch holds, and of how rows become one."""

from __future__ import annotations

from collections.abc import Mapping

from tests.codegen.idioms.outcomes import Idiom, idiom, noted, refused

_CLASSIFIER = """
class Classifier(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids):
        return self.head(self.hidden(ids).mean(1))


def build_model():
    return seeded(Classifier)
"""

BATCHES: Mapping[str, Idiom] = {
    "one tensor under two keys": idiom("""
class Shifting(Model):
    def forward(self, ids, labels):
        logits = super().forward(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def build_model():
    return seeded(Shifting)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"ids": ids, "labels": ids}


def build_dataset():
    found = rows(20, 1)
    return [{"ids": row["ids"], "labels": row["labels"]} for row in found]


del loss
"""),
    "two views of one tensor": idiom("""
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :LENGTH], "labels": ids[:, 1:]}
"""),
    "one tensor under two keys, some of it ignored": idiom("""
class Shifting(Model):
    def forward(self, ids, labels):
        logits = super().forward(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def build_model():
    return seeded(Shifting)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"ids": ids, "labels": ids}


def build_dataset():
    found = [{"ids": row["ids"], "labels": row["ids"].clone()} for row in rows(20, 1)]
    for number, row in enumerate(found):
        row["labels"][: number % 4] = -100
    return found


del loss
"""),
    "one tensor under three keys": idiom("""
class Twice(Model):
    def forward(self, ids, more):
        return self.head(self.hidden(ids) + self.words(more))


def build_model():
    return seeded(Twice)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"ids": ids, "more": ids, "labels": ids}


def build_dataset():
    return [{**row, "more": row["ids"].flip(0)} for row in rows(20, 1)]
"""),
    "one row for all in an example": idiom("""
class Masked(Model):
    def forward(self, ids, mask):
        return self.head(self.hidden(ids) * mask[..., None])


def build_model():
    return seeded(Masked)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    mask = torch.ones(1, LENGTH).expand(batch_size, LENGTH)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "mask": mask}


def build_dataset():
    mask = torch.ones(LENGTH, LENGTH).tril()
    return [{**row, "mask": mask[1 + n % 4]} for n, row in enumerate(rows(20, 1))]
"""),
    "a batch that is written to": idiom(
        """
class Written(Model):
    def forward(self, ids):
        ids[:, 0] = 1
        return super().forward(ids)


def build_model():
    return seeded(Written)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"ids": ids, "labels": ids}


""",
        every=refused("the model writes to batch['ids'], which may share memory with labels"),
    ),
    "ignored targets": idiom("""
def build_dataset():
    found = rows(20, 1)
    for number, row in enumerate(found):
        row["labels"] = row["labels"].clone()
        row["labels"][: number % 5] = -100
    return found
"""),
    "rows without any target": idiom("""
def build_dataset():
    found = rows(20, 1)
    for number, row in enumerate(found):
        row["labels"] = row["labels"].clone()
        row["labels"][: LENGTH if number % 3 else 2] = -100
    return found
"""),
    "a mask of truths": idiom("""
class Masked(Model):
    def forward(self, ids, mask):
        return super().forward(ids.masked_fill(~mask, 0)) * mask[..., None]


def build_model():
    return seeded(Masked)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    mask = torch.ones(batch_size, LENGTH, dtype=torch.bool)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "mask": mask}


def build_dataset():
    found = rows(20, 1)
    return [{**row, "mask": torch.arange(LENGTH) < 2 + n % 5} for n, row in enumerate(found)]


def loss(outputs, batch):
    each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return (each * batch["mask"]).sum() / batch["mask"].sum()
"""),
    "whole numbers of 32 bits": idiom("""
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1].int(), "labels": ids[:, 1:]}
"""),
    "images of bytes": idiom("""
class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(16, 4)

    def forward(self, image):
        x = (image.float() / 255 - 0.5) / 0.25
        return self.head(self.features(x).flatten(1))


def build_model():
    return seeded(Seeing)


def example_batch(batch_size):
    image = torch.randint(256, (batch_size, 3, 8, 8), dtype=torch.uint8)
    return {"image": image, "labels": torch.randint(4, (batch_size,))}


def build_dataset():
    torch.manual_seed(1)
    whole = example_batch(20)
    return [{key: value[n] for key, value in whole.items()} for n in range(20)]


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])
"""),
    "one label for each row": idiom(
        _CLASSIFIER
        + """
def example_batch(batch_size):
    return {
        "ids": torch.randint(WORDS, (batch_size, LENGTH)),
        "label": torch.randint(4, (batch_size,)),
    }


def build_dataset():
    return [{"ids": row["ids"], "label": int(row["ids"][0]) % 4} for row in rows(20, 1)]


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["label"])
"""
    ),
    "lists and arrays in rows": idiom("""
import numpy


def build_dataset():
    found = rows(20, 1)
    return [{"ids": r["ids"].tolist(), "labels": r["labels"].numpy(), "text": "…"} for r in found]
"""),
    "targets of 64 bits": idiom(
        _CLASSIFIER
        + """
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"ids": ids, "target": torch.rand(batch_size, 4, dtype=torch.float64)}


def build_dataset():
    numbers = torch.Generator().manual_seed(2)
    return [
        {"ids": row["ids"], "target": torch.rand(4, generator=numbers, dtype=torch.float64)}
        for row in rows(20, 1)
    ]


def loss(outputs, batch):
    return F.mse_loss(outputs, batch["target"].float())
"""
    ),
    "a weight for each row": idiom(
        _CLASSIFIER
        + """
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"ids": ids, "label": ids[:, 0] % 4, "weight": torch.rand(batch_size)}


def build_dataset():
    found = rows(20, 1)
    return [
        {"ids": r["ids"], "label": r["ids"][0] % 4, "weight": torch.tensor(0.1 + n % 7 / 3)}
        for n, r in enumerate(found)
    ]


def loss(outputs, batch):
    each = F.cross_entropy(outputs, batch["label"], reduction="none")
    return (each * batch["weight"]).mean()
"""
    ),
    "rows padded by a collate": idiom("""
def build_dataset():
    return [
        {"tokens": row["ids"][: 3 + number % 4].tolist()} for number, row in enumerate(rows(20, 1))
    ]


def build_collate():
    def pad(found):
        ids = [torch.tensor(row["tokens"]) for row in found]
        pad = nn.utils.rnn.pad_sequence
        whole = pad(ids, batch_first=True)
        labels = pad(ids, batch_first=True, padding_value=-100)
        return {"ids": whole[:, :-1], "labels": labels[:, 1:]}

    return pad
"""),
    "a stream of rows": idiom("""
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from rows(11, 1)


def build_dataset():
    return Stream()
"""),
    "a dataset that draws": idiom("""
import random


class Cropped(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = torch.arange(200) * 7 % WORDS

    def __len__(self):
        return 12

    def __getitem__(self, row):
        start = int(torch.randint(150, ())) + random.randrange(10)
        ids = self.tokens[start : start + LENGTH + 1]
        return {"ids": ids[:-1], "labels": ids[1:]}


def build_dataset():
    return Cropped()
"""),
    "a subset of a dataset": idiom("""
def build_dataset():
    whole = rows(40, 1)
    train, _ = torch.utils.data.random_split(whole, [20, 20], torch.Generator().manual_seed(0))
    return train
"""),
    "a plain number": idiom("""
class Cooled(Model):
    def forward(self, ids, heat):
        return super().forward(ids) / heat


def build_model():
    return seeded(Cooled)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "heat": 0.5}
"""),
    "a plain number for the loss": idiom("""
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "heat": 0.5}


def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1) / batch["heat"], batch["labels"].flatten())
"""),
    "a plain number that rows have otherwise": idiom(
        """
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "heat": 0.5}


def build_dataset():
    return [{**row, "heat": 0.5 + n} for n, row in enumerate(rows(20, 1))]


def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1) / batch["heat"], batch["labels"].flatten())
""",
        every=noted("To train on the rows' numbers"),
    ),
    "no dataset": idiom("""
del build_dataset
"""),
    "a dict in a dict": idiom(
        """
def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"ids": ids[:, :-1], "more": {"labels": ids[:, 1:]}}
""",
        every=refused("batch['more'] is a dict"),
    ),
}
