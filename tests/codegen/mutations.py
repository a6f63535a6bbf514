"""Edits of emitted scripts: each takes one thing out of a training, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import TrainingComparison, compared, compared_in_half
from autopar.codegen.proof.plain import TrainedAlone, task_of, train_alone
from autopar.codegen.proof.plain_half import PlainHalf, train_in_half
from autopar.codegen.proof.pretended_device import device_draw_faults
from autopar.codegen.proof.script_rank import run_as_it_is, run_script
from autopar.codegen.proof.verification import axes_of
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.codegen import remembering_edits
from tests.codegen.edits import Edit
from tests.codegen.plans import pinned_plan, plan_for
from tests.runtime.processes import RankError, run_on_ranks

STEPS, TOLERANCE = 2, 1e-9
HALF_STEPS = 8
SECONDS = 150.0  # for a script that hangs
_SMALL = ("layers=2", "seq_len=32")
REMEMBERING = Path(__file__).parent / "plain_models" / "remembering.py"
_AGAIN = (RecomputePin(modules="h.*", mode=Recompute.FULL),)

_AGAIN_IN_PART = (RecomputePin(modules="h.*", mode=Recompute.SELECTIVE),)

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
        "in bf16": {
            "degrees": (1, 2, 1), "microbatch": 2, "precision": Precision.BF16,
            "recompute": _AGAIN_IN_PART,
        },
        "runs again": {"data": 2, "microbatch": 2, "recompute": _AGAIN_IN_PART},
    }
)  # fmt: skip


_SEEDING = "    seed_all(options.seed, mesh)"
_CLIP = "    norm = clip_by_global_norm([model], clip, mesh, split=SPLITS)\n"
_CLIP_WHOLE = "    norm = clip_by_global_norm([model], clip, mesh)\n"
_STEP = "    optimizer.step()\n"
_LOG = "            losses.append(progress.log(step, loss, norm))\n"
_SELECTIVE = 'recompute(layer, "selective")'
# torch's own checkpoint keeps the generators of positional tensors' devices alone.
_BY_KEYWORDS = """import functools
        again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        layer.forward = functools.partial(
            lambda run, x: again(lambda y: run(y), y=x), layer.forward
        )"""
_IN_PART = """import functools
        from torch.utils import checkpoint

        kept = [torch.ops.aten._scaled_dot_product_efficient_attention.default]
        contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, kept)
        layer.forward = functools.partial(
            checkpoint.checkpoint, layer.forward, use_reentrant=False, context_fn=contexts
        )"""
_SCALED = "scale_loss(loss_of(model, batch), weight)"

# What any of these does to a training, verification has to find.
MUTATIONS: Mapping[str, tuple[Edit, ...]] = MappingProxyType(
    {
        "tp·dp": (
            Edit(
                "no sum of gradients before attention",
                "self.c_attn(sum_gradients(x, self.tensor))",
                "self.c_attn(x)",
            ),
            Edit("no sum of partials in attention", "sum_partials(y, self.tensor)", "y"),
            Edit(
                "no sum of gradients before the feed-forward",
                "self.c_fc(sum_gradients(x, self.tensor))",
                "self.c_fc(x)",
            ),
            Edit(
                "no sum of partials in the feed-forward",
                "sum_partials(F.linear(y, self.c_proj.weight), self.tensor)",
                "F.linear(y, self.c_proj.weight)",
            ),
            Edit(
                "queries, keys and values cut as one",
                '"h.*.attn.c_attn.weight": Split(0, ((4, 16),) * 3)',
                '"h.*.attn.c_attn.weight": Split(0, ((12, 16),))',
            ),
            Edit(
                "no dropout after attention",
                "self.c_proj.bias  # partial sums over heads, added up\n"
                "        return F.dropout(y, self.dropout, self.training)",
                "self.c_proj.bias\n        return y",
            ),
            Edit(
                "no dropout after the feed-forward",
                "self.tensor) + self.c_proj.bias\n"
                "        return F.dropout(y, self.dropout, self.training)",
                "self.tensor) + self.c_proj.bias\n        return y",
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
            Edit("data ranks draw alike", _SEEDING, "    torch.manual_seed(options.seed)"),
        ),
        "tp, sequence": (
            Edit("gradients are kept", "    optimizer.zero_grad()\n"),
            Edit("gradients of shared norms not summed",
                 "    sum_replicated([model], REPLICATED, mesh.tensor)\n"),
            Edit("sequence not gathered before the loss",
                 "gather(self.ln_f(x), 1, self.tensor)", "self.ln_f(x)"),
            Edit("partial sums sliced, not added up",
                 "y = scatter_sum(y, 1, self.tensor)  # partial",
                 "y = y.chunk(2, 1)[self.tensor.rank]  # partial"),
            Edit("the bias added by every rank",
                 "first_only(self.c_proj.bias, self.tensor)", "self.c_proj.bias"),
            Edit("positions of the first rank on all",
                 "take_shard(positions, 0, self.tensor)",
                 "take_shard(positions, 0, self.tensor) * 0"),
            Edit("one mask for all shards of the sequence",
                 "with split_randomness(self.tensor):\n            x = self.drop(x)",
                 "if True:\n            x = self.drop(x)"),
            Edit("the loss of a rank's own words", '["labels"].flatten(), tensor',
                 '["labels"].flatten(), tensor, reduction="sum"'),
        ),
        "pp": (
            Edit("gradients of tied weights not summed", "    model.tied.sum_gradients()\n"),
            Edit("tied weights count twice in the norm", ", tied=model.tied.not_owned"),
            Edit("stages draw alike", _SEEDING, "    torch.manual_seed(options.seed)"),
            Edit("nothing is seeded", _SEEDING),
            Edit("no dropout after the embedding", "self.drop(self.wte(input_ids) + x)",
                 "self.wte(input_ids) + x"),
            Edit("the loss of microbatches added up",
                 "microbatches = list(islice(data, MICROBATCHES))",
                 "microbatches = [(b, torch.ones_like(s)) for b, s in islice(data, MICROBATCHES)]"),
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
            Edit("norms as in evaluation", "    wrap(", "    model.eval()\n    wrap("),
        ),
        "in bf16": remembering_edits.FAULTS,
        "runs again": (
            Edit("other masks by keywords where a layer runs again", _SELECTIVE, _BY_KEYWORDS),
            Edit("other masks behind a kept attention", _SELECTIVE, _IN_PART),
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
            Edit("a print", _SEEDING, "    print(model.parts)\n" + _SEEDING),
        ),
        "ZeRO-1": (
            Edit("fewer lines of log", "LOG_EVERY = 10", "LOG_EVERY = 50"),
            Edit("more steps", "STEPS = 100", "STEPS = 1000"),
            Edit("a check of the loss", "        total += loss.detach()\n",
                 "        total += loss.detach()\n        assert loss.isfinite()\n"),
        ),
        "dp, batch norm": (
            Edit("a timer", "    losses = []\n",
                 "    import time\n\n    begun = time.perf_counter()\n"
                 "    losses = []\n    del begun\n"),
        ),
        "in bf16": remembering_edits.HARMLESS,
        "runs again": (
            Edit("layers that run again whole", _SELECTIVE, 'recompute(layer, "full")'),
        ),
    }
)  # fmt: skip


@cache
def plan_of(kind: str) -> Plan:
    """Return one of the seven plans."""
    if kind == "in bf16":
        file = load_model_file(str(REMEMBERING))
        graph = trace(file, precision=Precision.BF16)
        return plan_for(file, graph, (), **PLANS[kind])
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
        try:
            return _verdict(kind, path, compared(_ranks(plan, path), alone, axes_of(plan)))
        except RankError as error:
            return _failure(str(error))


def _verdict(kind: str, path: Path, comparison: TrainingComparison) -> str:
    """Return what is told of a comparison, then of one in 16 bits, then of draws on a device."""
    plan = plan_of(kind)
    if comparison.is_within(TOLERANCE) and plan.arrangement.precision.is_half:
        half = compared_in_half(_ranks(plan, path, "bfloat16", HALF_STEPS), *_in_half(kind))
        comparison = replace(comparison, half=half)
    if comparison.is_within(TOLERANCE) and "recompute" in PLANS[kind]:
        faults = device_draw_faults(path, [0], plan.arrangement.ranks)
        comparison = replace(comparison, faults=faults)
    return in_words(comparison)


def _ranks(plan: Plan, path: Path, dtype: str = "float64", steps: int = STEPS) -> list[Any]:
    words = ["--steps", str(steps), "--dtype", dtype, "--log-every", "1"]
    run = run_script if dtype == "float64" else run_as_it_is
    ranks = plan.arrangement.ranks
    return run_on_ranks(run_quietly, ranks, run, str(path), words, timeout_seconds=SECONDS)


def run_quietly(run: Callable[..., Any], path: str, arguments: Sequence[str]) -> Any:
    """Run a script whose log nobody reads."""
    with redirect_stdout(StringIO()):
        return run(path, arguments)


def _edited(text: str, edit: Edit) -> str:
    """Change a piece wherever it stands; a class has another name everywhere."""
    if edit.new.startswith("class "):
        old, new = (one.split()[1].partition("(")[0] for one in (edit.old, edit.new))
        return text.replace(old, new)
    return text.replace(edit.old, edit.new)


def in_words(comparison: TrainingComparison) -> str:
    """Return the verdict of a comparison, with the first thing that differs."""
    if comparison.faults:
        return f"begins, draws or clips otherwise: {comparison.faults[0]}"
    for what in ("loss", "norm", "gradient", "parameter"):
        found = getattr(comparison, what)
        if not found.largest <= TOLERANCE:
            return f"{what} differs by {found.largest:.1e}: {found.name}"
    half = comparison.half
    if half is None or half.is_as_near:
        return "equal"
    if half.faults:
        return f"in bf16, {half.faults[0]}"
    return f"in bf16, {half.loss:.1f} and {half.weights.largest:.1f} times as far from fp32"


def _failure(said: str) -> str:
    if "hangs" in said:
        return "stands still"
    errors = [line for line in said.splitlines() if "Error" in line and not line.startswith(" ")]
    return f"fails: {errors[-1] if errors else said.splitlines()[0]}"


@cache
def _in_half(kind: str) -> tuple[PlainHalf, PlainHalf]:
    plan = plan_of(kind)
    task = task_of(plan, plan.model.spec, steps=HALF_STEPS, dtype="bfloat16")
    (found,) = run_on_ranks(train_in_half, 1, task)
    return found


@cache
def _alone(kind: str) -> TrainedAlone:
    plan = plan_of(kind)
    (found,) = run_on_ranks(train_alone, 1, task_of(plan, plan.model.spec, steps=STEPS))
    return found
