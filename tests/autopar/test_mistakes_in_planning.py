"""Mistakes in the options and files of `autopar plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.plan.plan import Plan
from tests.autopar.commands import Autopar
from tests.autopar.mistakes import MODEL, Commit, Mistake, Tell, changed, mistake

CPUS = ("--gpus", "2", "--device", "cpu", "--global-batch", "8", "--precision", "fp32")
PLAN = ("plan", "model.py", *CPUS)
GPUS = ("plan", "model.py", "--gpus", "2", "--device", "h100-sxm")
RULES = (*PLAN, "-c", "rules.toml")


def planning(options: str, *telling: str, code: int = 2) -> Mistake:
    return mistake(" ".join((*PLAN, options)), *telling, files=changed(""), code=code)


def device(name: str, *telling: str) -> Mistake:
    arguments = ("plan", "model.py", "--gpus", "8", "--device", name)
    return Mistake(arguments=arguments, files=changed(""), telling=(f"'{name}' is not", *telling))


def pin(text: str, *telling: str, code: int = 2) -> Mistake:
    arguments = (*PLAN, "--pin", text)
    return Mistake(arguments=arguments, files=changed(""), telling=telling, code=code)


def dataset(row: str, *telling: str) -> Mistake:
    rows = f"def build_dataset():\n    return [{row}] * 8"
    return Mistake(arguments=PLAN, files=changed(rows), telling=telling)


def memory(text: str, *telling: str) -> Mistake:
    return Mistake(arguments=(*PLAN, "--memory", text), files=changed(""), telling=telling)


def rules(text: str, *telling: str, code: int = 2) -> Mistake:
    files = changed("") | {"rules.toml": text}
    return Mistake(arguments=RULES, files=files, telling=telling, code=code)


def machines(text: str, *telling: str) -> Mistake:
    arguments = ("plan", "model.py", "--cluster", "machines.toml")
    return Mistake(
        arguments=arguments, files=changed("") | {"machines.toml": text}, telling=telling
    )


def output(folder: str, *telling: str, model: str = "model.py", more: str = "") -> Mistake:
    arguments = ("plan", model, *CPUS, "-o", folder, *more.split())
    return Mistake(arguments=arguments, files={model: MODEL, "taken": ""}, telling=telling)


def stages(*pairs: tuple[str, int]) -> str:
    return "".join(f'[[stages]]\nmodules = "{name}"\nstage = {stage}\n' for name, stage in pairs)


MISTAKES = {
    "a misspelt device": device("h100-smx", "did you mean 'h100-sxm'?"),
    "cuda for a device": device("cuda", "leave the name out to take the GPUs of this machine"),
    "a device that nobody knows": device("zx81", "one of v100-16gb-sxm", "docs/cluster-file.md"),
    "rows that the weights are not for": dataset(
        '{"x": torch.zeros(5)}', "'x' has shape [5] in row 0", "weights for 4, not 5", "model.py"
    ),
    "rows without what the model is given": dataset(
        '{"features": torch.zeros(4)}', "has features, but no x", "the keys of example_batch"
    ),
    "no devices": planning(
        "--gpu 8", "there is no option --gpu … did you mean --gpus? … autopar plan --help"
    ),
    "the rows of a microbatch": planning(
        "--batch 8", "there is no option --batch … did you mean --global-batch?"
    ),
    "a time in words": planning(
        "--time-limit 1min", "'1min' is not a number … at: --time-limit … seconds, above 0"
    ),
    "a device for a number": planning(
        "--gpus h100-sxm", "'h100-sxm' is not a number of devices … --device which"
    ),
    "a number for a device": planning(
        "--gpus 8 --device 8", "the device '8' is not known … --gpus how many"
    ),
    "an option without its value": planning("--pin", "'--no-verify' is not of the form key=value"),
    "a value for a flag": planning("--force=yes", "option '--force' does not take a value"),
    "spaces around an equals sign": planning("--arg depth = 3", "unexpected extra argument"),
    "float32 for fp32": planning("--precision float32", "one of fp32, tf32 … did you mean 'fp32'?"),
    "float8 beside fp32": planning(
        "--float8 tensorwise", "float8 tensorwise (--float8) exclude each other"
    ),
    "float8 by its format": planning("--float8 e4m3", "one of none, tensorwise, rowwise"),
    "a pin by its long name": pin("tensor=2", "there is no 'tensor' to pin", "mean 'tp'?"),
    "a misspelt pin": pin("td=2", "there is no 'td' to pin", "did you mean 'tp'?"),
    "pins joined by a semicolon": pin("dp=1;tp=2", "is not of the form key=value", "dp=2,tp=4"),
    "a degree of nothing": pin("tp=0", "'0' is not a count", "at: --pin tp"),
    "a schedule in capitals": pin("schedule=1F1B", "did you mean '1f1b'?"),
    "more stages than the model has layers": planning(
        "--gpus 8 --device cpu --pin pp=8",
        "on 8 devices no plan satisfies pp=8 (--pin) … some of its 4 layers",
        code=3,
    ),
    "a unit in small letters": memory("3gb", "unknown unit 'gb'", "did you mean 3 GB?"),
    "a unit without its B": memory("3G", "unknown unit 'G'", "did you mean 3 GB?"),
    "a share without its sign": memory("90", "'90' has no unit"),
    "more memory than the devices have": Mistake(
        arguments=(*GPUS, "--memory", "900 GiB"),
        files=changed(""),
        telling=("a limit of 900 GiB for each device, and h100-sxm has 80 GiB", "at: --memory"),
    ),
    "more rows than the model's code takes": Mistake(
        arguments=PLAN,
        telling=("the model fixes its batch to 7", "/model.py:", "7 or 14"),
        files={"model.py": MODEL.replace("self.embed(x)", "self.embed(x.view(7, *x.shape[1:]))")},
        code=3,
    ),
    "pins outside of their section": rules("tp = 2", "'tp' comes before any section", "[pins]"),
    "a misspelt section": rules("[pin]\ntp = 2", "unknown key 'pin'", "line 1", "mean 'pins'?"),
    "a cluster file for rules": rules("[[nodes]]\n", "this is a cluster file", "--cluster"),
    "a misspelt word at the top": rules(
        'objective = "fast"', "rules.toml, line 1, objective", "one of step-time, memory, cost"
    ),
    "a rule in single brackets": rules("[splits]\n", "splits is not a list", "[[splits]]"),
    "a module on two stages": rules(
        stages(("blocks.0", 0), ("blocks.0", 1)),
        "blocks.0 on stage 0 (rules.toml, line 1) and blocks.0 on stage 1 (rules.toml, line 4)",
        code=3,
    ),
    "a pattern against one of its modules": rules(
        stages(("blocks.*", 0), ("blocks.1", 1)),
        "blocks.* on stage 0 (rules.toml, line 1) and blocks.1 on stage 1 (rules.toml, line 4)",
        code=3,
    ),
    "stages without a pipeline": rules(
        "[pins]\ndp = 2\n" + stages(("blocks.2", 1)),
        "dp=2 (rules.toml, line 2) and blocks.2 on stage 1 (rules.toml, line 3)",
        "leave one of them out",
        code=3,
    ),
    "a stage that is not there": rules(stages(("embed", 9)), "there is no stage 9"),
    "an axis to be split and not to be split": rules(
        '[pins]\ntp = 2\n[[splits]]\naxis = "batch"\nrule = "require"\n'
        '[[splits]]\naxis = "batch"\nrule = "forbid"\n',
        "one rule splits batch in '*', another never splits it anywhere",
        "leave out one of the two rules",
        code=3,
    ),
    "a constraints file for machines": machines("[pins]\n", "a constraints file", "--constraints"),
    "nodes in single brackets": machines("[nodes]\n", "no nodes are described", "[[nodes]]"),
    "a bandwidth without a unit": machines(
        '[[nodes]]\ndevice = "h100-sxm"\n[network]\nlike = "efa2"\nbandwidth = "200"\n',
        "'200' has no unit",
        "machines.toml, line 5, network.bandwidth",
    ),
    "a file for a folder": output("taken", "taken is a file, not a folder", "with -o"),
    "a folder called like a plan": output("plan.json", "-o plan.json names a file", "-o plan"),
    "the model file where the script goes": output(
        ".", "the script would replace the file that it is made from", model="train.py"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_planning_is_told(tell: Tell, mistake: Mistake) -> None:
    tell(mistake)


@pytest.mark.parametrize(
    ("error", "code", "telling"), [(KeyboardInterrupt, 130, ""), (MemoryError, 5, "out of memory")]
)
def test_a_search_that_is_ended_leaves_no_plan_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
    commit: Commit,
    error: type[BaseException],
    code: int,
    telling: str,
) -> None:
    def ended(*_: object, **__: object) -> Plan:
        raise error

    monkeypatch.setattr("autopar.planner.plan.fleet.search", ended)
    ran = commit(planning("", telling, code=code))
    assert (ran.code, ran.out) == (code, "")
    assert telling in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        ('[{"x": torch.zeros(4)}] * 8', ""),
        ("iter([])", ""),  # rows that come in their order are not begun
        ('open("/nowhere")', "the dataset could not be read here (FileNotFoundError: [Errno 2]"),
    ],
)
def test_what_does_not_show_in_the_first_row_is_left_to_the_script(
    autopar: Autopar, tmp_path: Path, rows: str, note: str
) -> None:
    text = changed(f"def build_dataset():\n    return {rows}")["model.py"]
    (tmp_path / "model.py").write_text(str(text))
    ran = autopar(*PLAN)
    assert ran.code == 0
    assert ("the dataset" in ran.err) == bool(note)
    assert note in ran.err.replace("\n", " ")
