"""Idioms of where weights come from, and how parameters and buffers are held."""

from __future__ import annotations

from collections.abc import Mapping

from tests.codegen.idioms.outcomes import Idiom, idiom

WEIGHTS: Mapping[str, Idiom] = {
    "state dict loaded": idiom("""
import io

torch.manual_seed(3)
kept = io.BytesIO()
torch.save(Model().state_dict(), kept)


def build_model():
    model = Model()
    kept.seek(0)
    model.load_state_dict(torch.load(kept))
    return model
"""),
    "state dict assigned": idiom("""
def build_model():
    other, model = seeded(Model), Model()
    model.load_state_dict(other.state_dict(), assign=True)
    return model
"""),
    "tied embedding": idiom("""
class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight


def build_model():
    return seeded(Tied)
"""),
    "one block called twice": idiom("""
class Twice(Model):
    def hidden(self, ids):
        x = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.norm(x)


def build_model():
    return seeded(Twice)
"""),
    "frozen embedding": idiom("""
def build_model():
    model = seeded(Model)
    model.words.requires_grad_(False)
    return model
"""),
    "frozen by name": idiom("""
def build_model():
    model = seeded(Model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "blocks.0" not in name
    return model
"""),
    "frozen copy as a teacher": idiom("""
class Distilled(Model):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(1.1)

    def forward(self, ids):
        x = y = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            for block in self.teacher:
                y = block(y)
        return self.head(self.norm(x)), F.mse_loss(x, y)


def build_model():
    return seeded(Distilled)


def loss(outputs, batch):
    logits, distance = outputs
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + 0.1 * distance
"""),
    "weight norm": idiom("""
def build_model():
    model = seeded(Model)
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
    return model
"""),
    "spectral norm": idiom("""
def build_model():
    model = seeded(Model)
    nn.utils.parametrizations.spectral_norm(model.blocks[0].down)
    return model
"""),
    "model.apply of an initialiser": idiom("""
def _fill(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.05)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.1)


def build_model():
    torch.manual_seed(7)
    return Model().apply(_fill)
"""),
    "a loop of initialisers": idiom("""
def build_model():
    model = seeded(Model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("down.weight"):
                nn.init.orthogonal_(parameter)
            elif parameter.dim() > 1:
                parameter.uniform_(-0.2, 0.2)
    return model
"""),
    "a random mask in a buffer": idiom("""
class Masked(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", (torch.rand(WIDTH) < 0.7).float(), persistent=False)

    def forward(self, ids):
        return self.head(self.hidden(ids) * self.kept)


def build_model():
    return seeded(Masked)
"""),
    "weights of a generator": idiom("""
class Drawn(Model):
    def __init__(self):
        super().__init__()
        numbers = torch.Generator().manual_seed(11)
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=numbers))
        self.register_buffer("order", torch.randperm(WIDTH, generator=numbers))

    def forward(self, ids):
        return self.head((self.hidden(ids) * self.scale)[..., self.order])


def build_model():
    return seeded(Drawn)
"""),
    "a list of parameters": idiom("""
class Scaled(Model):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in self.blocks)

    def hidden(self, ids):
        x = self.embed(ids)
        for block, scale in zip(self.blocks, self.scales):
            x = x + scale * block(x)
        return self.norm(x)


def build_model():
    return seeded(Scaled)
"""),
    "sinusoids in a buffer": idiom("""
class Waves(Model):
    def __init__(self):
        super().__init__()
        place = torch.arange(LENGTH)[:, None]
        rate = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        table = torch.zeros(LENGTH, WIDTH)
        table[:, 0::2], table[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
        self.register_buffer("table", table)

    def embed(self, ids):
        return self.words(ids) * math.sqrt(WIDTH) + self.table[: ids.shape[1]]


def build_model():
    return seeded(Waves)
"""),
    "adapters of low rank": idiom("""
class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


def build_model():
    model = seeded(Model).requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model
"""),
    "a pretrained model of a library": idiom("""
import os, tempfile
from transformers import GPT2Config, GPT2LMHeadModel

_SIZES = dict(n_embd=16, n_head=4, n_layer=2, n_positions=LENGTH, vocab_size=WORDS)
_DROPS = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
_FOLDER = os.path.join(tempfile.gettempdir(), "autopar-idioms-gpt2")
if not os.path.exists(os.path.join(_FOLDER, "config.json")):
    torch.manual_seed(5)
    GPT2LMHeadModel(GPT2Config(**_SIZES, **_DROPS, use_cache=False)).save_pretrained(_FOLDER)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GPT2LMHeadModel.from_pretrained(_FOLDER)

    def forward(self, ids):
        return self.inner(input_ids=ids).logits


def build_model():
    return Wrapped().train()
"""),
    "an assembled nn.Sequential": idiom("""
def build_model():
    torch.manual_seed(7)
    layers = [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(2)), nn.Linear(WIDTH, WORDS)]
    return nn.Sequential(*layers)


def example_batch(batch_size):
    ids = torch.randint(WORDS, (batch_size, LENGTH + 1))
    return {"input": ids[:, :-1], "labels": ids[:, 1:]}


def build_dataset():
    return [{"input": row["ids"], "labels": row["labels"]} for row in rows(20, 1)]
"""),
    "the encoder of torch": idiom("""
class Torchs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids):
        return self.head(self.encoder(self.words(ids), mask=self.mask, is_causal=True))


def build_model():
    return seeded(Torchs)
"""),
}
