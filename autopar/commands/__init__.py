"""The commands, one thin module each: they read arguments, call the planner, and print.

Wrong arguments are errors in autopar's form instead of typer's. A shell that completes a word waits
for this file, so it does not import rich.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from autopar.planner.cluster.toml_reading import did_you_mean
from autopar.planner.errors import ExitCode, InputError

# Typer exports only subclasses of UsageError, whose module depends on the version.
_UsageError: Any = typer.BadParameter.__base__


AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Command(TyperCommand):
    """A command that reports wrong arguments in autopar's form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the remaining arguments, as typer does."""
        return read_arguments(super().parse_args, ctx, args)


class CommandGroup(TyperGroup):
    """A group that reports an unknown command in autopar's form; without a command, its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments from the command's name on, as typer does."""
        if not args and not ctx.resilient_parsing:  # which completion sets
            typer.echo(ctx.get_help())
            raise typer.Exit(ExitCode.USAGE)
        return read_arguments(super().parse_args, ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command with its name and arguments."""
        if args[0] not in self.commands:
            found = f"there is no command {args[0]!r}"
            fix = did_you_mean(args[0], self.commands)
            raise InputError(found, where=ctx.command_path, fix=fix)
        return super().resolve_command(ctx, args)


def new_app() -> typer.Typer:
    """Return an application without commands; with a single one, typer runs it without a name."""
    return typer.Typer(
        cls=CommandGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )


def read_arguments(
    read: Callable[[Any, list[str]], list[str]], context: Any, arguments: list[str]
) -> list[str]:
    """Parse arguments with typer; its errors become AutoparErrors."""
    _refuse_words_of_a_shell(arguments, context.command_path)
    try:
        return read(context, arguments)
    except _UsageError as error:
        raise _refusal(error, context) from None


def _refuse_words_of_a_shell(arguments: Sequence[str], path: str) -> None:
    """Reject empty arguments, which come from unset variables, and a ~ that was not replaced."""
    for before, word in pairwise(["", *arguments]):
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if (equals or not option) and not value.strip():
            name = option or (
                before if before.startswith("-") and before != "--" else "an argument"
            )
            raise InputError(f"{name} is empty", where=path, fix="is a shell variable not set?")
        place = word.rpartition("=")[2]
        if place.startswith("~/"):
            found = f"the shell has not replaced the ~ of {word}"
            fix = f'write "$HOME{place[1:]}", or ./{place} for a folder that is called ~'
            raise InputError(found, where=path, fix=fix)


def _refusal(error: Any, context: Any) -> InputError:
    """Turn typer's error into an InputError that names the option or the argument."""
    path = context.command_path
    every = f"{path} --help lists what there is"
    if hasattr(error, "possibilities"):
        near = _near(error.option_name, context)
        fix = f"did you mean {near}? " if near else ""
        return InputError(f"there is no option {error.option_name}", where=path, fix=fix + every)
    name = getattr(getattr(error, "param", None), "metavar", None)
    if name is not None and not error.message:
        wanted = [one.metavar for one in context.command.params if one.metavar and one.required]
        return InputError(
            f"{name} is missing",
            where=path,
            expected=error.param.help,
            fix=f"{' '.join([path, *wanted])}; {path} --help has the options and an example",
        )
    found = error.format_message().rstrip(".")
    return InputError(found[:1].lower() + found[1:], where=path, fix=every)


def _near(option: str, context: Any) -> str:
    """Return an option with this word in its name, or else a similar option, or ""."""
    known = (name for one in context.command.params for name in (*one.opts, *one.secondary_opts))
    bare = {name.lstrip("-"): name for name in known}
    word = option.lstrip("-")
    having = [name for name in bare if word in name.split("-")]
    near = get_close_matches(word, having or bare, n=1, cutoff=0.0 if having else 0.5)
    return bare[near[0]] if near else ""
