"""The commands by name; each is imported when it is run: most need torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from autopar.command_line import Command, read_arguments
from autopar.planner.cluster.reading import did_you_mean
from autopar.planner.errors import InputError

# The function of each command, in the module of its name.
FUNCTIONS = {
    "inspect": "inspect",
    "plan": "plan",
    "explain": "explain_plan",
    "diff": "diff",
    "emit": "emit_script",
    "verify": "verify_plan",
    "dryrun": "dryrun",
    "profile": "profile",
    "doctor": "doctor",
}


class LazyCommands(Mapping[str, Any]):
    """What a group looks its commands up in."""

    def __getitem__(self, name: str) -> Any:
        function_name = FUNCTIONS[name]
        function = getattr(import_module(f"autopar.commands.{name}"), function_name)
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
        )
        alone.command(name, cls=Command)(function)
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(FUNCTIONS)

    def __len__(self) -> int:
        return len(FUNCTIONS)


class LazyGroup(TyperGroup):
    """A group that knows the names of its commands, and imports them one by one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments from the command's name on, as typer does."""
        return read_arguments(super().parse_args, ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is meant, with its name and its arguments."""
        if args[0] not in self.commands:
            found = f"there is no command {args[0]!r}"
            raise InputError(found, where=ctx.command_path, fix=did_you_mean(args[0], FUNCTIONS))
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, none of them imported."""
        del ctx
        return list(self.commands)
