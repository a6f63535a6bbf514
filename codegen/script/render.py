"""Turns the view of a script into its text."""

from __future__ import annotations

from autopar.codegen.python_text import Source
from autopar.codegen.script.filters import environment
from autopar.codegen.script.imports import script_imports
from autopar.codegen.script.script_view import ScriptView

TEMPLATE = "train.py.j2"


def render(view: ScriptView) -> Source:
    """Return the text of a script; it imports what it uses."""
    template = environment().get_template(TEMPLATE)
    body = template.render(view=view, imports=Source())
    return Source(template.render(view=view, imports=script_imports(body)))
