"""The command line: its commands, imported on first use."""

from __future__ import annotations

import ast
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

import autopar
from autopar.commands import Command, CommandGroup, new_app
from autopar.planner.errors import AutoparError, ExitCode, InputError, text_of

# The module and the function of each command.
FUNCTIONS = {
    "inspect": "dryrun.inspect",
    "plan": "plan.plan",
    "explain": "explain.explain_plan",
    "diff": "explain.diff",
    "report": "explain.report_plan",
    "trace": "explain.trace_plan",
    "emit": "emit.emit_script",
    "verify": "verify.verify_plan",
    "dryrun": "dryrun.dryrun",
    "rehearse": "dryrun.rehearse_plan",
    "profile": "dryrun.profile",
    "run": "run.run",
    "runs": "run.runs",
    "status": "status.status",
    "ckpt": "ckpt.ckpt",
    "cluster": "cluster.cluster",
    "doctor": "doctor.doctor",
}


class LazyCommands(Mapping[str, Any]):
    """The commands of a group, imported on first use."""

    def __getitem__(self, name: str) -> Any:
        module, _, function_name = FUNCTIONS[name].partition(".")
        function = getattr(import_module(f"autopar.commands.{module}"), function_name)
        if isinstance(function, typer.Typer):  # a group of subcommands
            group = typer.main.get_command(function)
            group.name = name
            return group
        alone = new_app()
        alone.command(name, cls=Command)(function)
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(FUNCTIONS)

    def __len__(self) -> int:
        return len(FUNCTIONS)


class LazyGroup(CommandGroup):
    """A group that knows the names of its commands without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        del ctx
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing the commands."""
        with self._help_alone():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands that complete a word, without importing them."""
        with self._help_alone():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _help_alone(self) -> Iterator[None]:
        """While the code inside runs, replace the commands by stand-ins with only a help text."""
        whole = self.commands
        self.commands = {name: TyperCommand(name, help=_help_of(name)) for name in FUNCTIONS}
        try:
            yield
        finally:
            self.commands = whole


def _help_of(name: str) -> str:
    """Return the docstring of a command, or of a group's callback, read from its file."""
    module, _, function = FUNCTIONS[name].partition(".")
    text = (Path(__file__).parent / "commands" / f"{module}.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            if node.name == function or f"{function}.callback()" in decorators:
                return ast.get_docstring(node) or ""
    return ""


_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_IMPASSABLE = (errno.ENAMETOOLONG, errno.ELOOP)  # errors of impossible paths

app = typer.Typer(
    name="autopar",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


_COMPLETING = "_AUTOPAR_COMPLETE"  # the variable that a shell sets to have a word completed
_SMALLER = "try a smaller model by --arg, or fewer arrangements by --pin"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def autopar_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plans how to split the training of a PyTorch model, and writes the script."""
    del version


def main(command: typer.Typer = app) -> None:
    """Run a command line; every AutoparError exits with its documented code."""
    if _COMPLETING in os.environ:  # a shell waits for the words, and rich is slow to import
        command()
    from autopar.console import noting_slow_phases, print_error

    warnings.simplefilter("ignore", DeprecationWarning)  # of torch and PuLP
    warnings.filterwarnings("ignore", module=r"torch\.")  # meant for torch's caller, not the user
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # replaces characters that the console cannot show
    try:
        with noting_slow_phases(), _telling_of_torch():
            command()
    except AutoparError as error:
        print_error(error)
        sys.exit(int(error.exit_code))
    except MemoryError:
        print_error(InputError("this machine is out of memory", fix=_SMALLER))
        sys.exit(int(ExitCode.NO_PLAN))
    except OSError as error:
        where = str(error.filename or "")
        # errors of object stores are always EIO
        if error.errno in _UNWRITABLE and "://" not in where:
            found = f"the output cannot be written: {error.strerror}"
            print_error(InputError(found, where=where, fix="free some space there"))
        elif where or error.errno in _IMPASSABLE:
            print_error(InputError(f"{error.strerror}", where=where))
        elif error.errno == errno.ENOENT:  # of os.getcwd()
            found = "the working directory has been removed"
            print_error(InputError(found, fix="change to one that is there"))
        else:
            raise
        sys.exit(int(ExitCode.USAGE))
    except KeyboardInterrupt:
        _leave_interrupted()
    except SystemExit as leaving:
        if leaving.code == ExitCode.INTERRUPTED:  # typer handles Ctrl-C itself and prints nothing
            _leave_interrupted()
        raise


@contextmanager
def _telling_of_torch() -> Iterator[None]:
    """Turn what `import torch` raises, in the code inside, into an AutoparError."""
    try:
        yield
    except Exception as error:
        frames = (frame for frame, _ in walk_tb(error.__traceback__))
        if getattr(error, "name", "") != "torch" and not any(map(_imports_torch, frames)):
            raise
        raise AutoparError(
            f"torch cannot be imported: {type(error).__name__}: {text_of(error).strip()}",
            fix="python -c 'import torch' has the same error: install torch again, or change the "
            "environment variable that it names",
            exit_code=ExitCode.MISMATCH,
        ) from None


def _imports_torch(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch"


def _leave_interrupted() -> NoReturn:
    print("interrupted", file=sys.stderr)
    sys.exit(int(ExitCode.INTERRUPTED))
