"""The command line: commands, and how errors are told and turned into exit codes."""

from __future__ import annotations

import errno
import gc
import io
import sys
import warnings
from typing import Annotated, NoReturn

import typer

import autopar
from autopar.console import tell_error
from autopar.lazy_commands import LazyGroup
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.still import telling_what_takes_long

_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
_IMPASSABLE = (errno.ENAMETOOLONG, errno.ELOOP)  # paths
_OBJECTS_BETWEEN_COLLECTIONS = 100_000  # torch makes so many that looking through them takes long

app = typer.Typer(
    name="autopar",
    cls=LazyGroup,
    help="Plans how to split the training of a PyTorch model, and writes the script.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


_SMALLER = "try a smaller model by --arg, or fewer arrangements by --pin"


class OutOfMemoryError(AutoparError):
    """Python could not get the memory that it asked for."""

    exit_code = ExitCode.NO_PLAN


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def autopar_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plans how to split the training of a PyTorch model, and writes the script."""
    del version
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


def main(command: typer.Typer = app) -> None:
    """Run a command line; every error of ours leaves with its documented exit code."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch's and PuLP's, as is usual
    warnings.filterwarnings("ignore", module=r"torch\.")  # told to who calls torch: that is us
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that lacks a sign shows another
    try:
        with telling_what_takes_long():
            command()
    except AutoparError as error:
        tell_error(error)
        sys.exit(int(error.exit_code))
    except MemoryError:
        tell_error(OutOfMemoryError("this machine is out of memory", fix=_SMALLER))
        sys.exit(int(OutOfMemoryError.exit_code))
    except OSError as error:
        where = str(error.filename or "")
        if error.errno in _UNWRITABLE and "://" not in where:  # all faults of stores are EIO
            found = f"the output cannot be written: {error.strerror}"
            tell_error(InputError(found, where=where, fix="make room where it goes"))
        elif where or error.errno in _IMPASSABLE:
            tell_error(InputError(f"{error.strerror}", where=where))
        else:
            raise
        sys.exit(int(ExitCode.USAGE))
    except KeyboardInterrupt:
        _leave_interrupted()
    except SystemExit as leaving:
        if leaving.code == ExitCode.INTERRUPTED:  # typer takes the key for itself, and says nothing
            _leave_interrupted()
        raise


def _leave_interrupted() -> NoReturn:
    print("interrupted", file=sys.stderr)
    sys.exit(int(ExitCode.INTERRUPTED))
