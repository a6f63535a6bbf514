"""The commands by name; each is imported when it is run: most need torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

from autopar.command_line import Command, Group

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
    "run": "run",
    "runs": "runs",
    "ckpt": "ckpt",
    "doctor": "doctor",
}


class LazyCommands(Mapping[str, Any]):
    """What a group looks its commands up in."""

    def __getitem__(self, name: str) -> Any:
        function_name = FUNCTIONS[name]
        function = getattr(import_module(f"autopar.commands.{name}"), function_name)
        if isinstance(function, typer.Typer):  # several commands under one name
            group = typer.main.get_command(function)
            group.name = name
            return group
        alone = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
        )
        alone.command(name, cls=Command)(function)
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(FUNCTIONS)

    def __len__(self) -> int:
        return len(FUNCTIONS)


class LazyGroup(Group):
    """A group that knows the names of its commands, and imports them one by one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, none of them imported."""
        del ctx
        return list(self.commands)
