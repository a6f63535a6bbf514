"""A repeated block is traced once, and the graph is the one that tracing each block would give."""

from pathlib import Path

import pytest

from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace.build import TRACED_BATCH, build
from autopar.planner.trace.export import export
from autopar.planner.trace.record import REPLAY
from tests.cells import cells
from tests.planner.trace.model_source import ops_of, traced, traced_without_folding, written

BLOCK = """
    class Block(nn.Module):
        def __init__(self, scale=1.0):
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.scale = scale

        def forward(self, x):
            return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))
"""

MODELS = {
    "layers of torch at lines of their own": """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last = nn.BatchNorm1d(4)

        def forward(self, x):
            x = self.norm(self.first(x))
            x = x + self.second(x)
            x = x - self.third(x)
            return self.last(x)

    def build_model():
        return Model()
    """,
    "equal blocks": """
    def build_model():
        return Stack(nn.Linear(4, 4), *[Block() for _ in range(4)], nn.Linear(4, 2))
    """,
    "blocks that differ in an attribute": """
    def build_model():
        return Stack(nn.Linear(4, 4), *[Block(scale) for scale in (1.0, 2.0, 1.0, 2.0)])
    """,
    "blocks beside a module that has two names": """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()
            self.wide = nn.Sequential(nn.Linear(4, 4), self.act)
            self.blocks = Stack(Block(), Block())

        def forward(self, x):
            return self.act(self.blocks(self.wide(x)))

    def build_model():
        return Model()
    """,
    "one block called several times": """
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.twin = nn.Linear(4, 4), Block(), Block()

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = self.block(x)
            return self.twin(x)

    def build_model():
        return Shared()
    """,
    "blocks in a row that run again on another shape": """
    class Twice(Stack):
        def forward(self, x):
            y = super().forward(x)
            return y * super().forward(x.unsqueeze(1)).squeeze(1)

    def build_model():
        return Twice(nn.Linear(4, 4), *[Block() for _ in range(3)])
    """,
    "blocks whose weights are tied in part": """
    def build_model():
        model = Stack(nn.Linear(4, 4), *[Block() for _ in range(3)])
        model[3].up.weight = model[1].up.weight
        return model
    """,
    "blocks of which one is tied inside": """
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.second(self.first(x))

    def build_model():
        model = Stack(nn.Linear(4, 4), *[Square() for _ in range(3)])
        model[1].second.weight = model[1].first.weight
        return model
    """,
    "blocks that read a tensor from elsewhere": """
    class Reading(Block):
        memory = []

        def forward(self, x):
            return super().forward(x) + self.memory[-1]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Reading() for _ in range(3)])

        def forward(self, x):
            x = self.first(x)
            Reading.memory.append(x.sigmoid())
            for block in self.blocks:
                x = block(x)
            Reading.memory.clear()
            return x

    def build_model():
        return Model()
    """,
    "blocks that leave a tensor in an attribute": """
    class Leaving(Block):
        def forward(self, x):
            self.balance = x.mean()
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Leaving() for _ in range(3)])

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x + sum(block.balance for block in self.blocks)

    def build_model():
        return Model()
    """,
    "blocks that append to a list": """
    class Leaving(Block):
        def forward(self, x, seen):
            seen.append(x.mean())
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Leaving() for _ in range(3)])

        def forward(self, x):
            x, seen = self.first(x), []
            for block in self.blocks:
                x = block(x, seen)
            return x + sum(seen)

    def build_model():
        return Model()
    """,
    "blocks that append to a list of their class": """
    class Leaving(Block):
        seen = []

        def forward(self, x):
            self.seen.append(x.mean())
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Leaving() for _ in range(3)])

        def forward(self, x):
            x = self.first(x)
            Leaving.seen.clear()
            for block in self.blocks:
                x = block(x)
            return x + sum(Leaving.seen)

    def build_model():
        return Model()
    """,
    "blocks whose children get hooks as the model runs": """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            seen = Model.seen = []
            if not hasattr(self, "heard"):
                for block in self.blocks:
                    block.up.register_forward_hook(lambda m, i, output: Model.seen.append(output))
            self.heard = True
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return x + sum(seen).mean()

    def build_model():
        return Model()
    """,
    "blocks that return several values": """
    class Pair(Block):
        def forward(self, x, *, mask):
            y = super().forward(x) * mask
            return {"y": y, "same": x, "parts": (y.mean(), None, 3)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Pair() for _ in range(3)])

        def forward(self, x):
            mask, x = x > 0, self.first(x)
            for block in self.blocks:
                out = block(x, mask=mask)
                x = out["y"] + out["same"] * out["parts"][0] * out["parts"][2]
            return x

    def build_model():
        return Model()
    """,
    "blocks under no_grad": """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                with torch.set_grad_enabled(block in list(self.blocks)[2:]):
                    x = block(x)
            return x

    def build_model():
        return Model()
    """,
    "blocks in train and in eval mode": """
    class Dropping(Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5, self.training)

    class Model(Stack):
        def train(self, mode=True):
            super().train(mode)
            self[2].eval()
            return self

    def build_model():
        return Model(nn.Linear(4, 4), *[Dropping() for _ in range(3)]).train()
    """,
    "blocks that are frozen": """
    def build_model():
        model = Stack(nn.Linear(4, 4), *[Block() for _ in range(4)])
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        return model
    """,
    "blocks with a hook": """
    def build_model():
        model = Stack(nn.Linear(4, 4), *[Block() for _ in range(3)])
        model[2].register_forward_hook(lambda module, inputs, output: output * 2)
        return model
    """,
}


def described(op: Op, graph: Graph) -> tuple[object, ...]:
    """Say all of an op but the names of the tensors that ops make."""
    outside = [name for name in op.inputs if name in {p.name for p in graph.parameters}]
    made = [(graph.tensors[name].shape, graph.tensors[name].dtype) for name in op.outputs]
    gradients = [graph.tensors[name].requires_grad for name in op.outputs]
    path = graph.calls[op.call].path if op.call in graph.calls else op.call
    return (op.target, path, op.grad_enabled, op.location, outside, op.writes, made, gradients)


def called(graph: Graph) -> list[tuple[str, str]]:
    """Return the calls of modules; the keys of a module's second call may be written otherwise."""
    return [(call.path, call.class_name) for call in graph.calls.values()]


def wiring(graph: Graph) -> list[list[object]]:
    """Return for each op the numbers of the ops that its inputs come from."""
    makers: dict[str, object] = {
        name: number for number, op in enumerate(graph.ops) for name in op.outputs
    }
    return [[makers.get(name, name) for name in op.inputs] for op in graph.ops]


@pytest.mark.parametrize("case", cells(MODELS, list(MODELS)[::2]))
def test_the_folded_graph_is_the_unfolded_one(tmp_path: Path, case: str) -> None:
    source = BLOCK + MODELS[case]
    folded, unfolded = traced(tmp_path, source), traced_without_folding(tmp_path, source)
    assert [op.target for op in folded.ops] == [op.target for op in unfolded.ops]
    for ours, theirs in zip(folded.ops, unfolded.ops, strict=True):
        assert described(ours, folded) == described(theirs, unfolded)
    assert wiring(folded) == wiring(unfolded)
    assert called(folded) == called(unfolded)
    assert (folded.parameters, folded.buffers) == (unfolded.parameters, unfolded.buffers)


@pytest.mark.parametrize(
    ("case", "replays"),
    [
        ("layers of torch at lines of their own", 2),
        ("equal blocks", 3),
        ("blocks that differ in an attribute", 2),
        ("blocks beside a module that has two names", 1),
        ("one block called several times", 3),
        ("blocks that return several values", 2),
        ("blocks that leave a tensor in an attribute", 0),
        ("blocks that append to a list", 0),
        ("blocks in train and in eval mode", 1),
        ("blocks with a hook", 1),
    ],
)
def test_equal_blocks_and_only_those_are_traced_once(
    tmp_path: Path, case: str, replays: int
) -> None:
    model_file = load_model_file(str(written(tmp_path, BLOCK + MODELS[case])))
    subject = build(model_file, device="meta", dtype=None, batch_size=TRACED_BATCH)
    nodes = export(subject, fold=True).program.graph.nodes
    assert sum(str(node.target) == REPLAY for node in nodes) == replays


def test_a_replayed_block_uses_its_own_parameters(tmp_path: Path) -> None:
    graph = traced(tmp_path, BLOCK + MODELS["equal blocks"])
    weights = [op.inputs[1] for op in ops_of(graph, "linear")]
    blocks = [f"{block}.{name}.weight" for block in range(1, 5) for name in ("up", "down")]
    assert weights == ["0.weight", *blocks, "5.weight"]


def test_tracing_leaves_the_model_and_torch_as_they_were(tmp_path: Path) -> None:
    source = BLOCK + MODELS["equal blocks"]
    assert traced(tmp_path, source) == traced(tmp_path, source)
