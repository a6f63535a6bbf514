"""Bad model files through the command line: one clear message, the right code, no traceback."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from autopar import cli

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

Inspect = Callable[..., tuple[int, str]]


@pytest.fixture
def inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Inspect:
    """Return `autopar inspect` as a function from its arguments to exit code and message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", "inspect", *arguments])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        captured = capsys.readouterr()
        assert captured.out == ""
        assert isinstance(raised.value.code, int)
        return raised.value.code, captured.err

    return run


def assert_clear(message: str, telling: str) -> None:
    """Check that a message is short, is one message, and says what is telling."""
    assert telling in message
    assert "Traceback" not in message
    assert message.startswith("error: ")
    assert message.count("error: ") == 1
    assert len(message.splitlines()) <= 6
    assert len(message) <= 1000


def changed(folder: Path, addition: str) -> str:
    """Write the good model file with later definitions that replace some of it."""
    (folder / "model.py").write_text(GOOD + dedent(addition))
    return "model.py"


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
        ("", "there is no file"),
    ],
)
def test_a_model_that_is_not_there_is_named(
    inspect: Inspect, tmp_path: Path, model: str, telling: str
) -> None:
    changed(tmp_path, "")
    (tmp_path / "notes.txt").write_text("not Python")
    code, message = inspect(model)
    assert code == 2
    assert_clear(message, telling)


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
        ("", "there is no function build_model"),
        ("def build_model(): ...\n", "there is no function example_batch"),
        ("build_model = 3\n", "build_model is a int, not a function"),
    ],
)
def test_a_file_that_does_not_load_is_told(
    inspect: Inspect, tmp_path: Path, source: str, telling: str
) -> None:
    (tmp_path / "helper_of_model.py").write_text("\nraise RuntimeError('from the helper')\n")
    (tmp_path / "model.py").write_text(source)
    code, message = inspect("model.py")
    assert code == 2
    assert_clear(message, telling)
    assert str(tmp_path) in message


def test_a_file_of_bytes_is_told(inspect: Inspect, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_bytes(b"\xff\xfe\x00\x80")
    code, message = inspect("model.py")
    assert code == 2
    assert_clear(message, "model.py")


SIZED = """
def build_model(size: str = "tiny", depth: int = 1, rate: float = 0.5, bias: bool = True):
    return Model()
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
def test_a_wrong_argument_is_told(
    inspect: Inspect, tmp_path: Path, arguments: list[str], telling: str
) -> None:
    model = changed(tmp_path, SIZED)
    code, message = inspect(model, *(part for text in arguments for part in ("--arg", text)))
    assert code == 2
    assert_clear(message, telling)


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
    inspect: Inspect, tmp_path: Path, addition: str, telling: str
) -> None:
    code, message = inspect(changed(tmp_path, addition))
    assert code == 2
    assert_clear(message, telling)


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
        ("{'x': torch.randn(n, 4).numpy()}", "batch['x'] is a ndarray"),
        ("{'x': torch.randn(n, 4), 3: torch.ones(n)}", "the batch has the key 3"),
        ("{'x': torch.randn(n, 4), 'a-b': torch.ones(n)}", "the batch has the key 'a-b'"),
        ("{'x': torch.randn(n, 4), 'class': torch.ones(n)}", "the batch has the key 'class'"),
        ("{'x': torch.randn(n, 4).to_sparse()}", "torch.sparse_coo"),
        ("{'x': torch.randn(n, 4, dtype=torch.cfloat)}", "torch.complex64"),
        ("{'x': torch.randn(n, 4, device='cuda')}", "leave the device out"),
        ("{'x': torch.randn(n, 4, device='meta')}", "batch['x'] is on meta"),
        ("{'y': torch.randn(n, 4)}", "forward needs x, which the batch does not have"),
        ("1 / 0", "calling example_batch failed: ZeroDivisionError"),
    ],
)
def test_a_batch_that_is_none_is_told(
    inspect: Inspect, tmp_path: Path, returned: str, telling: str
) -> None:
    code, message = inspect(changed(tmp_path, f"def example_batch(n): return {returned}"))
    assert code == 2
    assert_clear(message, telling)


def test_a_batch_key_that_nobody_takes_is_told(inspect: Inspect, tmp_path: Path) -> None:
    addition = """
    del loss

    def example_batch(batch_size):
        return {"x": torch.randn(batch_size, 4), "labels": torch.ones(batch_size)}
    """
    code, message = inspect(changed(tmp_path, addition))
    assert code == 2
    assert_clear(message, "forward does not take labels of the batch")


def test_an_example_batch_that_takes_no_size_is_told(inspect: Inspect, tmp_path: Path) -> None:
    addition = "def example_batch(): return {'x': torch.randn(7, 4)}"
    code, message = inspect(changed(tmp_path, addition))
    assert code == 2
    assert_clear(message, "example_batch")


@pytest.mark.parametrize(
    ("returned", "telling"),
    [
        ("outputs", "the loss has shape"),
        ("None", "the loss is None"),
        ("3.0", "the loss is a float"),
        ("outputs.sum().item()", "the loss is a plain float"),
        ("{'value': outputs.sum()}", "loss returned a dict"),
        ("outputs.argmax()", "the loss is of type torch.int64"),
        ("outputs.detach().sum()", "the loss has no gradient"),
        ("batch['x'].sum()", "the loss has no gradient"),
        ("torch.tensor(1.0)", "the loss has no gradient"),
        ("torch.complex(outputs, outputs).sum()", "the loss is of type torch.complex"),
        ("batch['labels']", "KeyError: 'labels'"),
    ],
)
def test_a_loss_that_cannot_train_is_told(
    inspect: Inspect, tmp_path: Path, returned: str, telling: str
) -> None:
    addition = f"def loss(outputs, batch): return {returned}"
    code, message = inspect(changed(tmp_path, addition))
    assert code in (2, 4)
    assert_clear(message, telling)


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
    inspect: Inspect, tmp_path: Path, line: str, telling: str
) -> None:
    model = changed(tmp_path, FORWARD.format(line=line))
    code, message = inspect(model)
    assert code == 4
    assert_clear(message, telling)
    lines = (tmp_path / model).read_text().splitlines()
    number = next(i for i, text in enumerate(lines, start=1) if "# here" in text)
    assert f"{tmp_path / model}:{number}, in module inner (Inner)" in re.sub(r"\s+", " ", message)
