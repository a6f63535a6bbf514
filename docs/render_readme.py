"""Puts the real output of `autopar inspect` into README.md: `python docs/render_readme.py`."""

import subprocess
import sys
from pathlib import Path

BEGIN, END = "<!-- inspect:begin -->", "<!-- inspect:end -->"
COMMAND = ("-m", "autopar", "inspect", "models_zoo/gpt2.py", "--arg", "size=124m")


def main() -> None:
    """Replace what stands between the two marks."""
    root = Path(__file__).parents[1]
    readme = root / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    shown = subprocess.run(
        [sys.executable, *COMMAND], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    lines = "\n".join(line.rstrip() for line in shown.splitlines())
    readme.write_text(f"{before}{BEGIN}\n```text\n{lines}\n```\n{END}{after}")


if __name__ == "__main__":
    main()
