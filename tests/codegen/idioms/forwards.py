"""Idioms of what a forward does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.codegen.idioms.outcomes import Idiom, idiom, noted, refused

_OWN = """

def build_model():
    return seeded(Own)
"""


def _own(body: str, **more: object) -> Idiom:
    """Return an idiom of a class Own, which the model file builds."""
    return idiom(f"\n\nclass Own(Model):\n{body}{_OWN}", **more)


def _doubled(value: str, gradient: str = "2 * gradient", **more: Any) -> Idiom:
    """Return an idiom of a Function that changes gradients alone, as one that reverses them."""
    return idiom(
        f"""
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return {value}

    @staticmethod
    def backward(ctx, gradient):
        return {gradient}


class Own(Model):
    def hidden(self, ids):
        return Doubled.apply(super().hidden(ids))
"""
        + _OWN,
        **more,
    )


FORWARDS: Mapping[str, Idiom] = {
    "activations in place": _own("""
    def hidden(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            made = block(x)
            x = made.mul_(0.9).add_(x)
        return F.relu_(self.norm(x))
"""),
    "a recurrent layer (LSTM)": _own("""
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def hidden(self, ids):
        x, _ = self.lstm(self.embed(ids))
        return self.norm(x)
"""),
    "a recurrent layer (GRU)": _own("""
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True)

    def hidden(self, ids):
        x, last = self.gru(self.embed(ids).transpose(0, 1))
        return self.norm(x.transpose(0, 1)) + last.mean(0).repeat(1, 2)[:, None]
"""),
    "a forward hook": _own("""
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, given, made: made * 1.5)
"""),
    "a gradient hook": _own(
        """
    def hidden(self, ids):
        x = super().hidden(ids)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x
""",
        otherwise={way: refused("the model itself changes gradients") for way in ("tp", "pp")},
    ),
    "checkpoints of its own": _own("""
    def hidden(self, ids):
        from torch.utils.checkpoint import checkpoint

        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)
"""),
    "checkpoints of a library": idiom("""
from transformers import LlamaConfig, LlamaForCausalLM

_SIZES = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)


def build_model():
    torch.manual_seed(7)
    config = LlamaConfig(**_SIZES, num_key_value_heads=2, vocab_size=WORDS, use_cache=False)
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH))
    return {"input_ids": ids, "labels": ids}


def build_dataset():
    return [{"input_ids": row["ids"], "labels": row["ids"]} for row in rows(20, 1)]


del loss
"""),
    "einsum": _own("""
    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(4, WIDTH // 4, WIDTH) * 0.1)

    def forward(self, ids):
        x = self.hidden(ids).unflatten(-1, (4, -1))
        return self.head(torch.einsum("bthd,hde->bte", x, self.mixing))
"""),
    "a count in a buffer": _own(
        """
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, ids):
        if self.training:
            self.steps += 1
        return super().forward(ids) * (1 + 0.1 * self.steps)
""",
        otherwise={"pp": refused("use the buffer steps, which they write, in one")},
    ),
    "a moving mean in a buffer": _own("""
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def hidden(self, ids):
        x = super().hidden(ids)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * self.norm.weight.detach())
        return x - 0.1 * self.mean
"""),
    "an image through batch norms": idiom(
        """
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        x = F.relu(self.norm(self.stem(image)))
        x = F.relu(x + self.again(self.conv(x)))
        return self.head(x.mean((2, 3)))


def example_batch(batch_size):
    return {"image": torch.randn(batch_size, 3, 6, 6), "labels": torch.randint(4, (batch_size,))}


def build_dataset():
    torch.manual_seed(1)
    whole = example_batch(20)
    return [{key: value[n] for key, value in whole.items()} for n in range(20)]


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch["labels"])
"""
        + _OWN,
        is_whole=True,
    ),
    "attention of one matrix": idiom(
        """
class Attending(Block):
    def __init__(self, width=WIDTH, heads=4):
        super().__init__(width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return super().forward(x)


class Own(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
"""
        + _OWN
    ),
    "a triangle of a mask": _own("""
    def __init__(self):
        super().__init__()
        mask = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        self.register_buffer("mask", mask)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def hidden(self, ids):
        x = self.embed(ids)
        b, t, c = x.size()
        q, k, v = (one(x).view(b, t, 4, c // 4).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.norm(x + y.transpose(1, 2).contiguous().view(b, t, c))
"""),
    "a mask of padding": _own("""
    def hidden(self, ids):
        pad = ids == 0
        x = self.embed(ids).masked_fill(pad[..., None], 0.0)
        for block in self.blocks:
            x = torch.where(pad[..., None], x, block(x))
        return self.norm(x)
"""),
    "fewer keys than queries": _own("""
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2 * 2 // 2)

    def hidden(self, ids):
        x = self.embed(ids)
        b, t, c = x.shape
        q = self.q(x).view(b, t, 4, 4).transpose(1, 2)
        k, v = (y.view(b, t, 1, 4).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
        k, v = (y.repeat_interleave(4, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm(x + y.transpose(1, 2).flatten(2))
"""),
    "rotary positions": _own("""
    def __init__(self):
        super().__init__()
        rate = 1.0 / (100 ** (torch.arange(0, 4, 2).float() / 4))
        angles = torch.outer(torch.arange(LENGTH).float(), rate)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def hidden(self, ids):
        x = self.embed(ids)
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, 4) for y in self.qkv(x).chunk(3, -1))
        q, k = (self.turned(y, t).transpose(1, 2) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return self.norm(x + y.transpose(1, 2).flatten(2))

    def turned(self, x, t):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[:t, None]).flatten(3).type_as(x)
"""),
    "a branch in training": _own("""
    def forward(self, ids):
        x = self.hidden(ids)
        if self.training:
            x = x * 0.9
        return self.head(x)
"""),
    **{
        f"a function of its own that gives {value}": _doubled(value)
        for value in ("x * 1.0", "x.view_as(x)", "x", "x.clone()")
    },
    "a function of its own that clips its gradient": _doubled(
        "x.view_as(x)", "gradient.clamp(-0.001, 0.001)"
    ),
    "a function of its own that norms its gradient": _doubled(
        "x.view_as(x)",
        "gradient / gradient.norm()",
        is_whole=True,
        otherwise={way: noted("of Doubled.backward") for way in ("dp", "ZeRO-3")},
    ),
    "a part without gradients": _own("""
    def forward(self, ids):
        with torch.no_grad():
            weight = torch.sigmoid(self.words(ids)).mean(-1, keepdim=True)
        return self.head(self.hidden(ids) * weight + self.words(ids).detach())
"""),
    "positions by cumulation": _own("""
    def embed(self, ids):
        places = (ids != 0).long().cumsum(1) * (ids != 0)
        return self.words(ids) + self.places(places.clamp(max=LENGTH - 1))
"""),
    "a bag of words": _own("""
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")

    def hidden(self, ids):
        return super().hidden(ids) + self.bag(ids)[:, None]
"""),
    "experts by a mask": _own("""
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def hidden(self, ids):
        x = super().hidden(ids)
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (shares * (chosen == number)).sum(-1, keepdim=True)
            found = found + share * expert(x)
        return x + found
"""),
    "layers that return more": idiom(
        """
class Telling(Block):
    def forward(self, x, scale=1.0):
        made = super().forward(x)
        return made * scale, made.mean(-1)


class Own(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Telling() for _ in range(2))

    def hidden(self, ids):
        x, means = self.embed(ids), []
        for block in self.blocks:
            x, mean = block(x, scale=0.9)
            means.append(mean)
        return self.norm(x) + torch.stack(means).sum(0)[..., None]
"""
        + _OWN
    ),
    "a residual kept for later": _own("""
    def hidden(self, ids):
        x, kept = self.embed(ids), {}
        for number, block in enumerate(self.blocks):
            x = block(x)
            kept[number] = x
        return self.norm(x + 0.5 * kept[0])
"""),
    "random numbers of Python": _own(
        """
    def hidden(self, ids):
        import random

        return super().hidden(ids) * random.random()
""",
        every=refused("random"),
    ),
}
