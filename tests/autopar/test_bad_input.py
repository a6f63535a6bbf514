"""Bad model files through the command line: one clear message, the right code, no traceback."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.autopar.mistakes import Mistake, Tell, mistake

GOOD = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

def build_model():
    return Model()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 4)}

def loss(outputs, batch):
    return outputs.square().mean()
"""

FORWARD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        {line}  # here
        return self.linear(x)
"""


def model(addition: str, *telling: str, options: str = "", code: int = 2) -> Mistake:
    """Inspect the good model file with later definitions that replace some of it."""
    files = {"model.py": GOOD + dedent(addition)}
    return mistake(f"inspect model.py {options}", *telling, files=files, code=code)


@pytest.mark.parametrize(
    ("model", "telling"),
    [
        ("modle.py", "did you mean model.py"),
        ("nowhere/model.py", "there is no file nowhere/model.py"),
        (".", "is a folder"),
        ("notes.txt", "is not a Python file"),
        ("model.py:bulid_model", "did you mean build_model"),
        ("model.py:make", "there is no function make"),
        ("model.py:nn", "nn is a module, not a function"),
        ("", "an argument is empty"),
    ],
)
def test_a_model_that_is_not_there_is_named(tell: Tell, model: str, telling: str) -> None:
    files = {"model.py": GOOD, "notes.txt": "not Python"}
    tell(Mistake(arguments=("inspect", model), telling=(telling,), files=files))


@pytest.mark.parametrize(
    ("source", "telling"),
    [
        ("def build_model(:\n", "invalid syntax"),
        ("import not_there_at_all\n", "No module named 'not_there_at_all'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", "ended the process (exit 3)"),
        ("import torch.distributed as d\nd.init_process_group('gloo')\n", "process group"),
        (
            "from torch.distributed import device_mesh as d\nd.init_device_mesh('cpu', (1,))\n",
            "process group",
        ),
        ("from torch.distributed import init_process_group as i\ni('gloo')\n", "process group"),
        ("import helper_of_model\n", "helper_of_model.py:2"),
        ("x = 'é'.encode('ascii')\n", "UnicodeEncodeError"),
        ("\0", "null bytes"),
        ("raise MemoryError\n", "MemoryError"),
        ("raise OSError('Repo id must be a name')\n", "name a folder that is there"),
        ("", "there is no function build_model"),
        ("def build_model(): ...\n", "there is no function example_batch"),
        ("build_model = 3\n", "build_model is a int, not a function"),
    ],
)
def test_a_file_that_does_not_load_is_told(
    tell: Tell, tmp_path: Path, source: str, telling: str
) -> None:
    helper = "\nraise RuntimeError('from the helper')\n"
    files = {"model.py": source, "helper_of_model.py": helper}
    tell(mistake("inspect model.py", telling, str(tmp_path), files=files))


def test_a_file_of_bytes_is_told(tell: Tell) -> None:
    files = {"model.py": b"\xff\xfe\x00\x80"}
    tell(mistake("inspect model.py", "model.py", files=files))


SIZED = """
def build_model(size: str = "tiny", depth: int = 1, rate: float = 0.5, bias: bool = True):
    return Model()
"""
LISTED = """
from enum import Enum
from typing import Literal, Optional

Kind = Enum("Kind", "BIG SMALL")

def build_model(
    widths: list[int] = [1], sizes: tuple[int, ...] | None = None, rates: Optional[dict] = None,
    act: Literal["gelu", "relu"] = "gelu", kind: Kind = Kind.BIG, later: "Kind" = Kind.BIG,
    n: int = 3,
):
    return Model()

def example_batch(n):
    return {"x": torch.randn(n, 4)}
"""


@pytest.mark.parametrize(
    ("arguments", "telling"),
    [
        (["sise=tiny"], "did you mean size?"),
        (["heads=3"], "known: bias, depth, rate, size"),
        (["size"], "is not of the form key=value"),
        (["=tiny"], "is not of the form key=value"),
        (["depth=two"], "depth=two is not of type int"),
        (["depth=1.5"], "depth=1.5 is not of type int"),
        (["depth=True"], "depth=True is not of type int"),
        (["depth=none"], "depth=none is not of type int"),
        (["rate=high"], "rate=high is not of type float"),
        (["rate=True"], "rate=True is not of type float"),
        (["bias=3"], "bias=3 is not of type bool"),
        (["depth=1", "depth=2"], "depth is given twice"),
        (["batch_size=3"], "no function of model.py takes it"),
    ],
)
def test_a_wrong_argument_is_told(tell: Tell, arguments: list[str], telling: str) -> None:
    tell(model(SIZED, telling, options=" ".join(f"--arg {text}" for text in arguments)))


@pytest.mark.parametrize(
    ("argument", "telling"),
    [
        ("widths=[1,2", "--arg widths=[1,2 is not of type list[int]"),
        ("widths=small", "write a Python literal in quotes: --arg 'widths=…'"),
        ("sizes=3", "--arg sizes=3 is not of type tuple[int, ...] | None"),
        ("rates=a:1", "--arg rates=a:1 is not of type Optional[dict]"),
        ("act=swish", "expected: one of gelu, relu"),
        ("kind=big", "the function takes an enum (Kind), which --arg cannot make"),
        ("later=big", "let it take a str, and call Kind(later) itself"),
        ("n=3", "--arg sets the parameters of this name in all functions: rename this one"),
    ],
)
def test_a_wrong_list_or_choice_is_told(tell: Tell, argument: str, telling: str) -> None:
    tell(model(LISTED, telling, options=f"--arg {argument}"))


@pytest.mark.parametrize(
    ("addition", "telling"),
    [
        ("def build_model(): raise ValueError('no such size')", "ValueError: no such size"),
        ("def build_model(): return None", "build_model returned None"),
        ("def build_model(): return 'gpt2'", "build_model returned a str"),
        ("def build_model(): return Model", "return Model(…), not the class"),
        ("def build_model(): return Model(), 3", "build_model returned a tuple"),
        ("def build_model(size): return Model()", "missing a required argument: 'size'"),
        ("def build_model(): yield Model()", "build_model returned a generator"),
        ("def build_model(): raise SystemExit(0)", "ended the process (exit 0)"),
        ("def build_model(): torch.distributed.init_process_group('gloo')", "process group"),
        ("def build_model(): return nn.ReLU()", "the model has no parameters"),
        ("def build_model(): return Model().requires_grad_(False)", "all 2 parameters are frozen"),
        ("def build_model(): return nn.LazyLinear(4)", "is lazy and has no shape yet"),
        ("def build_model(): return Model().to(torch.complex64)", "is complex (torch.complex64)"),
        ("def build_model(): return nn.Sequential(nn.SyncBatchNorm(4))", "0 is a SyncBatchNorm"),
        (
            "def build_model(): return nn.Sequential(nn.DataParallel(Model()))",
            "0 is wrapped for data parallelism already",
        ),
        (
            "def build_model(): return nn.Sequential(torch.jit.script(nn.Linear(4, 4)))",
            "0 is compiled by torch.jit",
        ),
        (
            "def build_model(): return nn.Sequential(torch.compile(Model()))",
            "0 is compiled by torch.compile",
        ),
        (
            """
            def build_model():
                model = Model()
                weight = torch.eye(4, device="cpu").to_sparse()
                model.inner.weight = nn.Parameter(weight)
                return model
            """,
            "inner.weight is sparse (torch.sparse_coo)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_factory_that_gives_nothing_to_train_is_told(
    tell: Tell, addition: str, telling: str
) -> None:
    tell(model(addition, telling))


@pytest.mark.parametrize(
    ("returned", "telling"),
    [
        ("torch.randn(n, 4)", "example_batch returned a Tensor"),
        ("None", "example_batch returned None"),
        ("{}", "the batch has no tensor"),
        ("{'x': 3}", "the batch has no tensor"),
        ("{'x': torch.randn(4, n)}", "has shape [4, 7] for example_batch(7)"),
        ("{'x': torch.randn(32, 4)}", "has shape [32, 4] for example_batch(7)"),
        ("{'x': torch.tensor(1.0)}", "has shape [] for example_batch(7)"),
        ("{'x': [torch.randn(n, 4)]}", "batch['x'] is a list"),
        ("{'x': torch.randn(n, 4), 3: torch.ones(n)}", "the batch has the key 3"),
        ("{'x': torch.randn(n, 4), 'a-b': torch.ones(n)}", "the batch has the key 'a-b'"),
        ("{'x': torch.randn(n, 4), 'class': torch.ones(n)}", "the batch has the key 'class'"),
        ("{'x': torch.randn(n, 4).to_sparse()}", "torch.sparse_coo"),
        ("{'x': torch.randn(n, 4, dtype=torch.cfloat)}", "torch.complex64"),
        ("{'x': torch.randn(n, 4, device='cuda')}", "leave the device out"),
        ("{'x': torch.randn(n, 4, device='meta')}", "batch['x'] is on meta"),
        ("1 / 0", "calling example_batch failed: ZeroDivisionError"),
    ],
)
def test_a_batch_that_is_none_is_told(tell: Tell, returned: str, telling: str) -> None:
    tell(model(f"def example_batch(n): return {returned}", telling))


def test_a_batch_key_that_nobody_takes_is_told(tell: Tell) -> None:
    addition = """
    del loss

    def example_batch(batch_size):
        return {"x": torch.randn(batch_size, 4), "labels": torch.ones(batch_size)}
    """
    tell(model(addition, "forward does not take labels of the batch"))


def test_an_example_batch_that_takes_no_size_is_told(tell: Tell) -> None:
    addition = "def example_batch(): return {'x': torch.randn(7, 4)}"
    tell(model(addition, "example_batch"))


@pytest.mark.parametrize(
    ("returned", "telling"),
    [
        ("None", "the loss is None"),
        ("3.0", "the loss is a float"),
        ("outputs.sum().item()", "the loss is a plain float"),
        ("{'value': outputs.sum()}", "loss returned a dict"),
        ("outputs.argmax()", "the loss is of type torch.int64"),
        ("outputs.detach().sum()", "the loss has no gradient"),
        ("batch['x'].sum()", "the loss has no gradient"),
        ("torch.tensor(1.0)", "the loss has no gradient"),
        ("torch.complex(outputs, outputs).sum()", "the loss is of type torch.complex"),
    ],
)
def test_a_loss_that_cannot_train_is_told(tell: Tell, returned: str, telling: str) -> None:
    tell(model(f"def loss(outputs, batch): return {returned}", telling))


@pytest.mark.parametrize(
    ("line", "telling"),
    [
        ("x = x if x.sum() > 0 else -x", "decides on the values of a tensor"),
        ("x = x * x.sum().item() if int(x.sum()) > 3 else x", "decides on the values of a tensor"),
        ("x = x @ torch.ones(5, 5)", "got [B, 4] X [5, 5]"),
        ("x = x + torch.ones(4, device='cpu' if x.is_meta else 'meta')", "different devices"),
        ("x = x + self.not_there", "not_there"),
        ("x = x.unknown_method()", "unknown_method"),
        ("x = x + x.to('cuda')", "the script moves the model and each batch"),
        ("raise ValueError('an input of odd length')", "an input of odd length"),
        ("assert x.shape[1] == 5, 'five columns'", "five columns"),
        ("x = torch.from_numpy(x.detach().numpy())", "numpy"),
    ],
)
def test_a_forward_that_cannot_be_traced_is_told_by_file_line_and_module(
    tell: Tell, tmp_path: Path, line: str, telling: str
) -> None:
    text = FORWARD.format(line=line)
    number = (GOOD + text).partition("# here")[0].count("\n") + 1
    place = f"{tmp_path / 'model.py'}:{number}, in module inner (Inner)"
    tell(model(text, telling, place, code=4))
