"""Edits of emitted scripts: each takes one thing out of a training, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import Comparison, RankTrained, compared
from autopar.codegen.proof.reference import Trained, task_of, train_alone
from autopar.codegen.proof.script_rank import run_script
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.plan import Plan
from tests.codegen.equality import axes_of
from tests.codegen.plans import pinned_plan
from tests.runtime.processes import RankError, run_on_ranks

STEPS, TOLERANCE = 2, 1e-9
SECONDS = 150.0  # for a script that hangs
_SMALL = ("layers=2", "seq_len=32")
_AGAIN = (RecomputePin(modules="h.*", mode=Recompute.FULL),)

PLANS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tp·dp": {
            "tensor": 2, "data": 2, "microbatch": 2, "split": ("heads", "ffn"),
            "recompute": _AGAIN, "zero_levels": (Zero.NONE,),
        },
        "tp, sequence": {"tensor": 2, "microbatch": 4, "split": ("vocab", "heads", "seq", "ffn")},
        "pp": {"pipeline": 2, "microbatch": 2},
        "ZeRO-1": {"data": 2, "microbatch": 2, "zero_levels": (Zero.OPTIMIZER,)},
        "dp, batch norm": {"data": 2},
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of a script, and what comes in its place."""

    name: str
    old: str
    new: str = ""


_SEEDING = "    seed_all(options.seed, mesh)  # dropout differs from data rank to data rank\n"
_CLIP = "    norm = clip_by_global_norm([model], clip, mesh, split=SPLITS)\n"
_CLIP_WHOLE = "    norm = clip_by_global_norm([model], clip, mesh)\n"
_STEP = "    optimizer.step()\n"
_LOG = "            losses.append(progress.log(step, loss, norm))\n"
_SCALED = "scale_loss(loss_of(model, batch), scale)"

# What any of these does to a training, verification has to find.
MUTATIONS: Mapping[str, tuple[Edit, ...]] = MappingProxyType(
    {
        "tp·dp": (
            Edit(
                "no sum of gradients before attention",
                "self.c_attn(sum_gradients(x, self.tensor))",
                "self.c_attn(x)",
            ),
            Edit("no sum of partials in attention", "sum_partials(x, self.tensor)", "x"),
            Edit(
                "no sum of gradients before the feed-forward",
                "self.c_fc(sum_gradients(x, self.tensor))",
                "self.c_fc(x)",
            ),
            Edit(
                "no sum of partials in the feed-forward",
                "sum_partials(F.linear(x, self.c_proj.weight), self.tensor)",
                "F.linear(x, self.c_proj.weight)",
            ),
            Edit(
                "queries, keys and values cut as one",
                '"h.*.attn.c_attn.weight": Split(0, ((4, 16),) * 3)',
                '"h.*.attn.c_attn.weight": Split(0, ((12, 16),))',
            ),
            Edit(
                "no dropout after attention",
                "self.c_proj.bias  # partial sums over heads, added up\n"
                "        return F.dropout(x, self.dropout, self.training)",
                "self.c_proj.bias\n        return x",
            ),
            Edit(
                "no dropout after the feed-forward",
                "self.tensor) + self.c_proj.bias\n"
                "        return F.dropout(x, self.dropout, self.training)",
                "self.tensor) + self.c_proj.bias\n        return x",
            ),
            Edit(
                "no dropout of attention weights",
                "dropout_p=self.dropout if self.training else 0.0",
                "dropout_p=0.0",
            ),
            Edit("one mask for all heads", "with split_randomness(self.tensor):", "if True:"),
            Edit("nothing is seeded", _SEEDING),
            Edit("no causal mask", ", is_causal=True", ""),
            Edit("another mask when a layer runs again", 'recompute(layer, "full")',
                 "layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, "
                 "use_reentrant=False, preserve_rng_state=False)"),
            Edit("parameters that are whole count twice in the norm", "split=SPLITS",
                 'split=[n for n, _ in model.named_parameters()]'),
            Edit("clipped after the step", _CLIP + _STEP, _STEP + _CLIP),
            Edit("data ranks draw alike", _SEEDING, "    torch.manual_seed(options.seed)\n"),
        ),
        "tp, sequence": (
            Edit("gradients are kept", "    optimizer.zero_grad()\n"),
            Edit("gradients of shared norms not summed",
                 "    sum_replicated([model], SUMMED, mesh.tensor)\n"),
            Edit("sequence not gathered before the loss",
                 "gather(self.ln_f(x), 1, self.tensor)", "self.ln_f(x)"),
            Edit("partial sums sliced, not added up",
                 "x = scatter_sum(x, 1, self.tensor)  # partial",
                 "x = x.chunk(2, 1)[self.tensor.rank]  # partial"),
            Edit("the bias added by every rank",
                 "first_only(self.c_proj.bias, self.tensor)", "self.c_proj.bias"),
            Edit("positions of the first rank on all",
                 "0, self.tensor)\n        # partial",
                 "0, self.tensor) * 0\n        # partial"),
            Edit("one mask for all shards of the sequence",
                 "with split_randomness(self.tensor):\n            x = self.drop(x)",
                 "if True:\n            x = self.drop(x)"),
            Edit("the loss of a rank's own words", 'reduction="mean"', 'reduction="sum"'),
        ),
        "pp": (
            Edit("gradients of tied weights not summed", "    tied.sum_gradients()\n"),
            Edit("tied weights count twice in the norm", ", tied=tied.not_owned"),
            Edit("stages draw alike", _SEEDING, "    torch.manual_seed(options.seed)\n"),
            Edit("nothing is seeded", _SEEDING),
            Edit("no dropout after the embedding", "self.drop(self.wte(input_ids) + x)",
                 "self.wte(input_ids) + x"),
            Edit("the loss of microbatches added up", "scale) for batch, scale in weighed",
                 "torch.ones_like(scale)) for batch, scale in weighed"),
            Edit("a stage takes no step", _STEP,
                 "    if mesh.pipeline.rank == 0:\n        optimizer.step()\n"),
        ),
        "ZeRO-1": (
            Edit("no scale of a microbatch's loss", _SCALED, "loss_of(model, batch)"),
            Edit("averaged with the first microbatch", "number == MICROBATCHES", "number == 1"),
            Edit("gradients are not clipped", _CLIP_WHOLE, "    norm = torch.zeros(())\n"),
            Edit("clipped at twice the norm", "clip, mesh", "2 * clip, mesh"),
            Edit("no schedule of the rate", "        scheduler.step()\n"),
            Edit("every rank has an order of its own", "    data = read_batches(",
                 "    options.seed += mesh.data.rank\n    data = read_batches("),
            Edit("weights of another seed", "record(new_model, seed=seed",
                 "record(new_model, seed=seed + 1"),
        ),
        "dp, batch norm": (
            Edit("statistics of each rank alone", "sync_batch_norm=SYNC_BATCH_NORM",
                 "sync_batch_norm=False"),
            Edit("norms as in evaluation", "    wrap(\n", "    model.eval()\n    wrap(\n"),
        ),
    }
)  # fmt: skip

HARMLESS: Mapping[str, tuple[Edit, ...]] = MappingProxyType(
    {
        "tp·dp": (
            Edit("another class name", "class TensorParallelMLP(MLP):", "class SplitMLP(MLP):"),
            Edit("a comment", "# partial sums over ffn, added up", "# Megatron's g"),
        ),
        "tp, sequence": (
            Edit("a variable's name", "outputs.flatten(0, 1)", "(flat := outputs.flatten(0, 1))"),
            Edit("a docstring", '"""Train gpt2', '"""My own: train gpt2'),
        ),
        "pp": (
            Edit("another line of log", _LOG, _LOG + "            print(step)\n"),
            Edit("a print", _SEEDING, _SEEDING + "    print(model.parts)\n"),
        ),
        "ZeRO-1": (
            Edit("fewer lines of log", "LOG_EVERY = 10", "LOG_EVERY = 50"),
            Edit("more steps", "STEPS = 100", "STEPS = 1000"),
            Edit("a check of the loss", "        total += loss.detach()\n",
                 "        total += loss.detach()\n        assert loss.isfinite()\n"),
        ),
        "dp, batch norm": (
            Edit("a timer", "    losses: list[float] = []\n",
                 "    import time\n\n    begun = time.perf_counter()\n"
                 "    losses: list[float] = []\n    del begun\n"),
        ),
    }
)  # fmt: skip


@cache
def plan_of(kind: str) -> Plan:
    """Return one of the five plans."""
    if kind == "dp, batch norm":
        return pinned_plan("resnet.py", **PLANS[kind])
    return pinned_plan("gpt2.py", _SMALL, **PLANS[kind])


def verdict(kind: str, edit: Edit) -> str:
    """Return what verification says of a plan's script with an edit: "equal", or what is wrong."""
    plan, alone = plan_of(kind), _alone(kind)
    with TemporaryDirectory(prefix="edited-") as folder:
        path = write_script(plan, Path(folder))
        text = path.read_text(encoding="utf-8")
        assert edit.old in text, f"{edit.name}: the script of {kind} has no {edit.old!r}"
        path.write_text(_edited(text, edit), encoding="utf-8")
        arguments = ["--steps", str(STEPS), "--dtype", "float64", "--log-every", "1"]
        try:
            ranks = run_on_ranks(
                run_quietly, plan.arrangement.ranks, str(path), arguments, timeout_seconds=SECONDS
            )
        except RankError as error:
            return _failure(str(error))
    return told(compared(ranks, alone, axes_of(plan)))


def run_quietly(path: str, arguments: Sequence[str]) -> RankTrained:
    """Run a script whose log nobody reads."""
    with redirect_stdout(StringIO()):
        return run_script(path, arguments)


def _edited(text: str, edit: Edit) -> str:
    """Change a piece wherever it stands; a class has another name everywhere."""
    if edit.new.startswith("class "):
        old, new = (one.split()[1].partition("(")[0] for one in (edit.old, edit.new))
        return text.replace(old, new)
    return text.replace(edit.old, edit.new)


def told(comparison: Comparison) -> str:
    """Return the verdict of a comparison, with the first thing that differs."""
    if comparison.faults:
        return f"draws or clips otherwise: {comparison.faults[0]}"
    for what in ("loss", "norm", "gradient", "parameter"):
        found = getattr(comparison, what)
        if not found.largest <= TOLERANCE:
            return f"{what} differs by {found.largest:.1e}: {found.name}"
    return "equal"


def _failure(said: str) -> str:
    if "hangs" in said:
        return "stands still"
    errors = [line for line in said.splitlines() if "Error" in line and not line.startswith(" ")]
    return f"fails: {errors[-1] if errors else said.splitlines()[0]}"


@cache
def _alone(kind: str) -> Trained:
    plan = plan_of(kind)
    (found,) = run_on_ranks(train_alone, 1, task_of(plan, plan.model.spec, steps=STEPS))
    return found
