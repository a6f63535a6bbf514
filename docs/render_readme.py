"""Puts real output into the notebook, README.md and docs: `python docs/render_readme.py`.

What stands between `<!-- show: COMMAND -->` and `<!-- end -->` becomes what the command prints.
`autopar` runs as this Python's module; several commands are joined by `&&`, and the last one shows.
A constraints file that begins with `global_batch` is made from the table of demands.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from autopar.planner.plan.declared.settings import example_file

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "planning.ipynb"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SHOWN = re.compile(r"(<!-- show: (?P<commands>.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
SESSION = re.compile(r"(<!-- session: (?P<notebook>.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
KEYS = re.compile(r"(?<=```toml\n)global_batch = .*?(?=\n\n\[\[)", re.DOTALL)


def main() -> None:
    """Run the notebook, then remake every page that shows output."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    printed = run_cells([source_of(cell) for cell in code])
    for number, (cell, text) in enumerate(zip(code, printed, strict=True), start=1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell.update(execution_count=number, outputs=[stream] if text else [])
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for page in PAGES:
        text = SESSION.sub(_session, page.read_text(encoding="utf-8"))
        page.write_text(SHOWN.sub(_shown, with_keys(text)), encoding="utf-8")


def with_keys(page: str) -> str:
    """Return a page whose constraints file has every key of the table of demands."""
    return KEYS.sub(lambda _: example_file(), page)


def source_of(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def run_cells(sources: list[str]) -> list[str]:
    """Run cells one after the other in the notebook's folder; return what each prints."""
    scope: dict[str, Any] = {}
    printed, before = [], Path.cwd()
    os.chdir(NOTEBOOK.parent)
    try:
        for source in sources:
            with contextlib.redirect_stdout(io.StringIO()) as stdout:
                exec(compile(source, NOTEBOOK.name, "exec"), scope)
            printed.append(stdout.getvalue())
    finally:
        os.chdir(before)
    return printed


def _session(match: re.Match[str]) -> str:
    notebook = json.loads((ROOT / match["notebook"]).read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"][1:]:  # the page has a heading of its own
        if cell["cell_type"] == "markdown":
            parts.append(source_of(cell))
            continue
        parts.append(f"```python\n{source_of(cell)}\n```")
        parts += [f"```text\n{''.join(one['text']).rstrip()}\n```" for one in cell["outputs"]]
    return match[1] + "\n" + "\n\n".join(parts) + "\n\n" + match[3]


def _shown(match: re.Match[str]) -> str:
    printed = ""
    for command in match["commands"].split(" && "):
        printed = _output(shlex.split(command))
    lines = "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")
    return f"{match[1]}```text\n{lines}\n```\n{match[3]}"


def _output(words: list[str]) -> str:
    if words[0] == "autopar":
        words = [sys.executable, "-m", *words]
    elif words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    fresh = {**os.environ, "AUTOPAR_CACHE": ""}  # as a reader's first run
    done = subprocess.run(words, cwd=ROOT, env=fresh, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
