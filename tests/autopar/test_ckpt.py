"""`autopar ckpt`: checkpoints are listed, verified, exported and compared without a training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW

from autopar.planner.costs.prediction import Zero
from autopar.runs.run_record import RunRecord, own_process, write_record
from autopar.runtime.checkpointing import model_files
from autopar.runtime.checkpointing.manifest import NAME, Moment, rank_file
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.locations import StorePath
from autopar.runtime.ranks.mesh import start, stop
from tests.autopar.commands import Autopar, Ran
from tests.bucket import CLOSED, bucket
from tests.codegen.kinds import plan_of
from tests.codegen.plans import pinned_plan
from tests.codegen.test_resume import STILL, trained
from tests.runtime.checkpointing.written import write_checkpoint

Ckpt = Callable[..., Ran]
_Place = TypeVar("_Place", Path, StorePath)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.head = nn.Linear(4, 3)
        self.other = nn.Linear(3, 4)
        self.other.weight = self.first.weight
        self.register_buffer("table", torch.ones(2), persistent=False)


def write(folder: _Place, step: int, *, moved: float = 0.0) -> _Place:
    """Write the checkpoint of a small model on one rank; `moved` is added to one weight."""
    mesh = start(pipeline=1, data=1, tensor=1)
    torch.manual_seed(0)
    model = Small()
    optimizer = build_optimizer([model], lambda p: AdamW(p, lr=0.1), zero=0, mesh=mesh)
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    with torch.no_grad():
        model.head.weight[1, 2] += moved
    moment = Moment(step=step, rows=8 * step, updates=step)
    built = dict.fromkeys(model.state_dict(), torch.float32)
    failure = write_checkpoint(folder, moment, "digest", [model], optimizer, mesh, built=built)
    stop(mesh)
    assert failure is None
    return folder / f"step-{step}"


@pytest.fixture
def ckpt(autopar: Autopar) -> Ckpt:
    return lambda *words: autopar("ckpt", *map(str, words))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_list_has_step_rows_size_and_plan_and_what_is_cut_off(tmp_path: Path, ckpt: Ckpt) -> None:
    write(tmp_path, 2)
    cut = write(tmp_path, 10) / rank_file(0)
    cut.write_bytes(cut.read_bytes()[:-1])
    (tmp_path / "step-7.tmp").mkdir()
    (tmp_path / "step-5.broken").mkdir()
    ran = ckpt("ls", tmp_path)
    assert ran.code == 0
    lines = {line.split()[0].rstrip(":"): line for line in ran.out.splitlines() if line.strip()}
    assert lines["step-2"].split()[1:3] == ["2", "16"]
    assert "one device" in lines["step-2"]
    assert lines["step-2"].split()[-1] == "intact"
    assert "damaged: rank-00000.safetensors has" in lines["step-10"]
    assert "being written" in lines["step-7.tmp"]
    assert "set aside" in lines["step-5.broken"]
    found = json.loads(ckpt("ls", tmp_path, "--json").out)["checkpoints"]
    assert [(one["step"], one["is_whole"]) for one in found] == [(2, True), (10, False)]


def test_a_run_that_went_on_elsewhere_lists_what_it_kept_there(tmp_path: Path, ckpt: Ckpt) -> None:
    write(tmp_path / "elsewhere", 3)
    run = tmp_path / "run"
    run.mkdir()
    host, process = own_process()
    record = RunRecord(
        name="run",
        model="model.py:build_model",
        arguments=(),
        plan="one device",
        predicted_step_seconds=1.0,
        command="torchrun train.py",
        checkpoints=str(tmp_path / "elsewhere"),
        metrics=str(run / "metrics.jsonl"),
        host=host,
        process=process,
        started_at=0.0,
    )
    write_record(run, record)
    assert "step-3" in ckpt("ls", run).out


def test_a_flipped_byte_is_found_by_verify_and_not_by_a_list(tmp_path: Path, ckpt: Ckpt) -> None:
    write(tmp_path, 1)
    flip(write(tmp_path, 2) / rank_file(0))
    assert "damaged" not in ckpt("ls", tmp_path).out
    ran = ckpt("verify", tmp_path)
    assert ran.code == 6
    assert "step-1: intact, 1 file" in ran.out
    assert "step-2: damaged: rank-00000.safetensors has other contents" in ran.out
    assert ckpt("verify", tmp_path / "step-1").code == 0


def test_a_store_is_listed_verified_exported_and_compared_as_a_disk_is(
    tmp_path: Path, ckpt: Ckpt
) -> None:
    run = bucket(tmp_path / "store")
    write(run, 1)
    write(tmp_path / "kept", 1)
    step = write(run, 2, moved=0.25)
    (run / "step-7" / rank_file(0)).write([b"half"])
    ran = ckpt("ls", run)
    assert ran.out.count("one device   intact") == 2
    assert "step-7: being written, or left" in ran.out
    assert ckpt("verify", run).out.count("intact, 1 file") == 2
    for place, out in ((run / "step-1", run / "out"), (tmp_path / "kept", tmp_path / "out")):
        assert ckpt("export", place, "-o", out).code == 0
    name = "model.safetensors"
    assert (run / "out" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    ran = ckpt("diff", tmp_path / "kept", step)
    assert (ran.code, "weight: 1 of 6 tensors differ" in ran.out) == (1, True)
    (step / rank_file(0)).write([step.url.encode()])
    assert ckpt("verify", run).code == 6
    ran = ckpt("ls", f"{CLOSED}/run")
    assert (ran.code, "error: PermissionError: Forbidden" in ran.err) == (2, True)


def test_all_that_is_wrong_with_a_checkpoint_is_told(tmp_path: Path, ckpt: Ckpt) -> None:
    plan = plan_of("ddp")
    trained(plan, tmp_path, 1, "--checkpoint", str(tmp_path / "kept"))
    step = tmp_path / "kept" / "step-1"
    flip(step / rank_file(0))
    (step / rank_file(1)).unlink()
    ran = ckpt("verify", step)
    assert ran.code == 6
    assert "rank-00000.safetensors has other contents" in ran.out
    assert "rank-00001.safetensors is missing" in ran.out


@pytest.mark.parametrize("command", ["export", "diff"])
def test_a_damaged_checkpoint_is_neither_exported_nor_compared(
    command: str, tmp_path: Path, ckpt: Ckpt
) -> None:
    step = write(tmp_path, 1)
    (step / NAME).write_text((step / NAME).read_text().replace("digest", "digset", 1))
    file = tmp_path / "out.safetensors"
    ran = ckpt(command, step, *([step] if command == "diff" else ["-o", file]))
    assert ran.code == 6
    assert f"{NAME} has been changed" in ran.err
    assert not file.exists()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("zero3", "float32"), ("tp_zero1", "bfloat16"), ("interleaved", "bfloat16")]
)
def test_an_export_is_the_one_of_the_script_byte_for_byte(
    kind: str, dtype: str, tmp_path: Path, ckpt: Ckpt
) -> None:
    options = ("--checkpoint", str(tmp_path / "kept"), "--dtype", dtype)
    trained(plan_of(kind), tmp_path, 2, *options)
    file = tmp_path / "out.safetensors"
    ran = ckpt("export", tmp_path / "kept", "-o", file)
    assert ran.code == 0, ran.err
    assert "after step 2" in ran.out
    assert file.read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_a_tied_weight_is_exported_once_and_a_table_that_is_not_kept_never(
    tmp_path: Path, ckpt: Ckpt
) -> None:
    assert ckpt("export", write(tmp_path, 1), "-o", tmp_path / "out.safetensors").code == 0
    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        names, others = set(file.keys()), file.metadata()
    weights = {"first.weight", "first.bias", "head.weight", "head.bias", "other.bias"}
    assert names == weights
    assert others["other.weight"] == "first.weight"


def test_a_folder_gets_shards_and_their_index(
    tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "SHARD_BYTES", 60)
    step = write(tmp_path, 1)
    assert ckpt("export", step, "-o", tmp_path / "out").code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    found = {k: v for file in files for k, v in load_file(tmp_path / "out" / file).items()}
    ckpt("export", step, "-o", tmp_path / "one.safetensors")
    whole = load_file(tmp_path / "one.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_file_of_others_is_not_replaced(tmp_path: Path, ckpt: Ckpt) -> None:
    file = tmp_path / "mine.safetensors"
    file.write_bytes(b"mine")
    ran = ckpt("export", write(tmp_path, 1), "-o", file)
    assert ran.code == 6
    assert "autopar has not exported it" in ran.err
    assert file.read_bytes() == b"mine"


def test_what_differs_is_named_with_how_much(tmp_path: Path, ckpt: Ckpt) -> None:
    one, other = write(tmp_path / "a", 1), write(tmp_path / "b", 1, moved=0.25)
    ran = ckpt("diff", one, other)
    assert ran.code == 1
    assert "weight: 1 of 6 tensors differ" in ran.out
    line = next(line for line in ran.out.splitlines() if "head.weight" in line)
    assert "1 of 12" in line
    assert "0.25" in line
    assert "exp_avg: all 5 tensors are equal" in ran.out
    found = json.loads(ckpt("diff", one, other, "--json").out)
    moved = [t for t in found["tensors"] if t["unequal"]]
    assert [(t["name"], t["unequal"]) for t in moved] == [("head.weight", 1)]
    assert moved[0]["largest"] == pytest.approx(0.25)


def test_checkpoints_of_unlike_plans_are_compared(tmp_path: Path, ckpt: Ckpt) -> None:
    sharded = {"data": 2, "microbatch": 2, "zero_levels": (Zero.PARAMETERS,)}
    for name, pins in (("zero3", sharded), ("one", {"microbatch": 4})):
        plan = pinned_plan("gpt2.py", STILL, **pins)
        trained(plan, tmp_path, 2, "--checkpoint", str(tmp_path / name), "--dtype", "float64")
    shutil.copytree(tmp_path / "zero3", tmp_path / "copy")
    ran = ckpt("diff", tmp_path / "zero3", tmp_path / "copy")
    assert (ran.code, "Equal to the last bit" in ran.out) == (0, True)
    found = json.loads(ckpt("diff", tmp_path / "zero3", tmp_path / "one", "--json").out)
    assert not found["unlike"]
    assert not found["numbers"]
    kinds = {one["kind"] for one in found["tensors"]}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq"}
    assert 0 < max(one["largest"] for one in found["tensors"]) < 1e-9


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ls", "nowhere"), "nowhere is not there"),
        (("ls", "."), "there are no checkpoints"),
        (("export",), "FOLDER is missing"),
        (("lst", "."), "there is no command 'lst'"),
    ],
)
def test_bad_input_leaves_with_2(
    words: tuple[str, ...], told: str, tmp_path: Path, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = ckpt(*words)
    assert ran.code == 2
    assert told in ran.err
