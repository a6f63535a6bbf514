"""What a script looks like, and that it is never lost."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from inspect import signature
from pathlib import Path

import pytest

from autopar.codegen.emit import emit, write_script
from autopar.codegen.script.render import is_unchanged
from autopar.planner.errors import InputError
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.space import DEFAULT_BUCKET_BYTES
from autopar.planner.plan.traced import ChangedModelError, model_spec
from autopar.planner.trace import trace
from autopar.runtime.data_parallel.wrapping import wrap
from tests.cells import cells
from tests.clock import least_seconds
from tests.codegen.kinds import KINDS, plan_of
from tests.codegen.matrix import plan_of as matrix_plan
from tests.codegen.plans import plan_for

ROOT = Path(__file__).parents[2]
MODEL_FUNCTIONS = ("split_loss", "valid_targets", "crossing")  # printed as classes are
LINES_WITHOUT_OPENED = 220


def data_parallel() -> Plan:
    return plan_of("ddp")


def lines_of(plan: Plan, destination: Path) -> list[str]:
    return emit(plan, destination=destination).splitlines()


@cache
def emitted(kind: str) -> str:
    """Return the script of a kind beside its model, so that the length of a path wraps no line."""
    return emit(plan_of(kind), destination=ROOT / "models_zoo" / "train.py")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the script of every kind."""
    folder = tmp_path_factory.mktemp("scripts")
    written = {kind: folder / f"train_{kind}.py" for kind in KINDS}
    for kind, path in written.items():
        path.write_text(emitted(kind), encoding="utf-8")
    return written


def of_tool(*words: str, paths: Iterable[Path]) -> subprocess.CompletedProcess[str]:
    """Run a checking tool on scripts, with the settings of this repository."""
    command = [sys.executable, "-m", *words, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    "words",
    [
        ("format", "--check"),
        ("check", "--ignore", "N812,ARG"),
    ],  # F, and the signatures of the author
    ids=["format", "check"],
)
def test_scripts_pass_ruff_as_they_come_out(
    words: tuple[str, ...], scripts: dict[str, Path]
) -> None:
    done = of_tool("ruff", *words, "--config", "pyproject.toml", paths=scripts.values())
    assert done.returncode == 0, done.stdout + done.stderr


# As a line of each file: with options for all files, mypy would read torch anew, which it has in
# its cache from the check of this repository.
WITHOUT_WORDS = """
# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# mypy: disable-error-code=override
"""


def test_scripts_pass_mypy_as_they_come_out(scripts: dict[str, Path], tmp_path: Path) -> None:
    for path in scripts.values():
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8") + WITHOUT_WORDS)
    done = of_tool("mypy", "--config-file", "pyproject.toml", paths=tmp_path.glob("*.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no issues found in {len(scripts)} source files" in done.stdout


READS_NUMBERS = """
import torch
from torch import nn

def build_model():
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates))

def example_batch(batch_size):
    return {"input": torch.randn(batch_size, 4)}

def loss(outputs, batch):
    return outputs.mean()
"""


def test_a_script_is_not_written_over_its_model_file(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(READS_NUMBERS, encoding="utf-8")
    file = load_model_file(str(path))
    plan = plan_for(file, trace(file), (), degrees=(1, 1, 1))
    with pytest.raises(InputError, match="would replace the file that it is made from"):
        write_script(plan, tmp_path, force=True)
    assert path.read_text(encoding="utf-8") == READS_NUMBERS


def test_data_parallelism_leaves_every_class_of_the_user_as_it_is(tmp_path: Path) -> None:
    tree = ast.parse(emit(data_parallel(), destination=tmp_path / "train.py"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("kind", cells(("ddp", "tp", "pp"), ("tp",)))
def test_a_script_does_not_grow_with_depth(kind: str, tmp_path: Path) -> None:
    few, many = (
        len(lines_of(plan_of(kind, f"layers={layers}"), tmp_path / "train.py")) for layers in (4, 8)
    )
    assert abs(few - many) <= 3  # the prose of the docstring may break elsewhere


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_is_short_beside_its_opened_classes(kind: str) -> None:
    script = emitted(kind)
    printed = (ast.ClassDef, ast.FunctionDef)
    opened = sum(
        (node.end_lineno or 0) - node.lineno + 3
        for node in ast.parse(script).body
        if isinstance(node, printed[0])
        or (isinstance(node, printed[1]) and node.name in MODEL_FUNCTIONS)
    )
    assert len(script.splitlines()) - opened <= LINES_WITHOUT_OPENED


def test_a_script_for_unequal_nodes_says_how_to_start_it() -> None:
    plan = plan_of("all_zero1")
    script = emit(
        replace(plan, machines=replace(plan.machines, nodes=3)),
        destination=ROOT / "models_zoo" / "train.py",
    )
    assert "Run it on each of 3 nodes" in script
    assert "torchrun --nnodes 3 --nproc-per-node DEVICES --node-rank NODE" in script
    assert "8 on all together" in script


@pytest.mark.parametrize(("kind", "device"), [("ddp", "cpu by formula"), ("all_zero1", "own name")])
def test_a_cpu_is_one_by_whatever_name(kind: str, device: str, tmp_path: Path) -> None:
    plan = plan_of(kind)
    named = replace(plan, machines=replace(plan.machines, device="own name"))
    assert f'PREDICTED = ("{device}", ' in emit(named, destination=tmp_path / "train.py")


def test_emission_is_quick(tmp_path: Path) -> None:
    plan = plan_of("tp")
    file = load_model_file(
        plan.model.spec, [f"{key}={value}" for key, value in plan.model.arguments]
    )
    traced = least_seconds(lambda: trace(file), tries=2)  # emission does so, for other lengths
    emitted = least_seconds(lambda: emit(plan, destination=tmp_path / "train.py"), tries=2)
    assert emitted - traced < 1.0


def test_a_script_that_was_changed_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    path = write_script(data_parallel(), tmp_path)
    written = path.read_text()
    assert is_unchanged(written)
    earlier = re.sub(
        r" \(checksum (.*)\)\.\n# Once .*", r", which keeps changes by hand: \1.", written
    )
    assert earlier != written
    assert is_unchanged(earlier), "as versions before wrote the line"
    write_script(data_parallel(), tmp_path)  # as it was: no harm
    changed = written.replace("STEPS = 100", "STEPS = 101")
    path.write_text(changed)
    assert not is_unchanged(changed)
    with pytest.raises(InputError, match="changed since"):
        write_script(data_parallel(), tmp_path)
    assert path.read_text() == changed
    write_script(data_parallel(), tmp_path, force=True)
    assert path.read_text() == written


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine = 1\n")
    with pytest.raises(InputError, match="did not write"):
        write_script(data_parallel(), tmp_path)


def test_a_model_that_is_built_otherwise_than_planned_is_refused(tmp_path: Path) -> None:
    plan = data_parallel()
    first, *others = plan.graph.parameters
    fewer = replace(plan, graph=replace(plan.graph, parameters=tuple(others)))
    told = f"{first.name} has the shape .*, and is not there in the plan"
    with pytest.raises(ChangedModelError, match=re.compile(told)):
        emit(fewer, destination=tmp_path / "train.py")


def test_a_model_file_is_found_from_a_folder_above_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = data_parallel()
    plan = replace(plan, model=replace(plan.model, spec="zoo/net.py:make"))
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/net.py").write_text("", encoding="utf-8")
    (tmp_path / "out/first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "out")
    assert model_spec(plan, Path("first")) == str(tmp_path / "zoo/net.py:make")
    with pytest.raises(InputError, match="neither here nor beside the plan or above it"):
        model_spec(replace(plan, model=replace(plan.model, spec="zoo/other.py")), Path("first"))


def test_a_script_without_a_size_of_buckets_has_the_planned_one() -> None:
    assert signature(wrap).parameters["bucket_bytes"].default == DEFAULT_BUCKET_BYTES


SCORED = """
import torch
import torch.nn.functional as F
from torch import nn

def build_model():
    return nn.Sequential(nn.Embedding(60, 24), nn.Linear(24, 60, bias=False))

def example_batch(batch_size):
    return {"input": torch.randint(60, (batch_size, 10))}

def loss(outputs, batch):
    rows, length, words = outputs[:, :-1].shape
    logits = outputs[:, :-1].reshape(rows * length, words)
    return F.cross_entropy(logits, batch["input"][:, 1:].reshape(rows * length))
"""


def test_no_size_in_a_printed_loss_has_the_name_of_the_batch(tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(SCORED, encoding="utf-8")
    file = load_model_file(str(tmp_path / "scored.py"))
    plan = plan_for(file, trace(file), (), degrees=(1, 1, 2), split=("vocab",))
    tree = ast.parse(emit(plan, destination=tmp_path / "train.py"))
    (loss,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "split_loss")
    stored = {
        node.id
        for node in ast.walk(loss)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert not stored & {argument.arg for argument in loss.args.args}
    assert any("shape" in ast.unparse(node) for node in loss.body)


GROUPED = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Conv2d(96, 96, 3, groups=3), nn.GroupNorm(3, 96), nn.ReLU())

def example_batch(batch_size):
    return {"input": torch.randn(batch_size, 96, 64, 64)}

def loss(outputs, batch):
    return outputs.mean()
"""


def test_a_rank_has_as_many_groups_as_channels_where_they_do_not_divide(tmp_path: Path) -> None:
    (tmp_path / "grouped.py").write_text(GROUPED, encoding="utf-8")
    file = load_model_file(str(tmp_path / "grouped.py"))
    graph = trace(file)
    plan = plan_for(file, graph, (), degrees=(1, 1, 2))
    script = emit(plan, destination=tmp_path / "train.py")
    assert "groups=local_size(((3, 1),), self.tensor)" in script
    assert "groups=3" not in script.replace(" ", "")


STANDARDISED = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weight = F.batch_norm(self.weight[None], None, None, training=True)[0]
        x = F.dropout(F.linear(x, weight), 0.1, training=self.training)
        for layer in self.layers:
            x = layer(x)
        return x.mean()

def build_model():
    return Model()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 8)}
"""


def test_weights_are_standardised_by_themselves_in_evaluation_too(tmp_path: Path) -> None:
    (tmp_path / "standardised.py").write_text(STANDARDISED, encoding="utf-8")
    file = load_model_file(str(tmp_path / "standardised.py"))
    plan = plan_for(file, trace(file), (), degrees=(2, 1, 1))
    script = emit(plan, destination=tmp_path / "train.py")
    assert "None, None, training=True" in script
    assert "0.1, self.training" in script


def test_sides_of_images_between_stages_are_read_each_from_its_own(tmp_path: Path) -> None:
    script = emit(matrix_plan("resnet", "pp 1f1b 4"), destination=tmp_path / "train.py")
    assert "Crossing((ROWS, 32, (height + 1) // 2, (width + 1) // 2))" in script
