"""The command line: commands, and how errors are told and turned into exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import autopar
from autopar.commands.diff import diff
from autopar.commands.doctor import doctor
from autopar.commands.dryrun import dryrun
from autopar.commands.emit import emit_script
from autopar.commands.explain import explain_plan
from autopar.commands.inspect import inspect
from autopar.commands.plan import plan
from autopar.commands.profile import profile
from autopar.commands.validate import validate
from autopar.commands.verify import verify_plan
from autopar.console import tell_error
from autopar.planner.errors import AutoparError, ExitCode

app = typer.Typer(
    name="autopar",
    help="Plans how to split the training of a PyTorch model, and writes the script.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(inspect)
app.command()(plan)
app.command("explain")(explain_plan)
app.command()(diff)
app.command("emit")(emit_script)
app.command("verify")(verify_plan)
app.command()(dryrun)
app.command()(profile)
app.command()(validate)
app.command()(doctor)


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


def main() -> None:
    """Run the command line; every error of ours leaves with its documented exit code."""
    try:
        app()
    except AutoparError as error:
        tell_error(error)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(int(ExitCode.INTERRUPTED))
