"""Puts the real output of commands into README.md and docs: `python docs/render_readme.py`.

What stands between `<!-- show: COMMAND -->` and `<!-- end -->` becomes what the command prints.
`autopar` runs as this Python's module; several commands are joined by `&&`, and the last one shows.
A constraints file that begins with `global_batch` is made from the table of demands.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from autopar.planner.plan.declared.settings import example_file

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SHOWN = re.compile(r"(<!-- show: (?P<commands>.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
KEYS = re.compile(r"(?<=```toml\n)global_batch = .*?(?=\n\n\[\[)", re.DOTALL)


def main() -> None:
    """Remake every page that shows output."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(SHOWN.sub(_shown, with_keys(text)), encoding="utf-8")


def with_keys(page: str) -> str:
    """Return a page whose constraints file has every key of the table of demands."""
    return KEYS.sub(lambda _: example_file(), page)


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
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
