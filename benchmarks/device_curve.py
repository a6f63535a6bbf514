"""Plans BERT-large for 1 to 64 A100s on each of two networks, to see how many are worth it.

    python benchmarks/device_curve.py [ethernet-10 infiniband-hdr] [-o FILE]

Each curve is what `autopar plan models_zoo/bert.py --arg size=large --global-batch 256 --gpus
1,2,4,8,16,32,64 --cluster FILE` prints; the page shows FILE above it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "device_curve.md"
NETWORKS = ("ethernet-10", "infiniband-hdr")
GPUS = "1,2,4,8,16,32,64"
CLUSTER = """\
[[nodes]]
count = 8
device = "a100-80gb-sxm"
devices = 8

[network]
like = "{network}"
"""
OPTIONS = ("--arg", "size=large", "--global-batch", "256", "--gpus", GPUS)


def printed(network: str) -> str:
    """Return the table of a network and the line below it, as the command prints them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(CLUSTER.format(network=network), encoding="utf-8")
        command = [
            sys.executable, "-m", "autopar", "plan", str(ROOT / "models_zoo" / "bert.py"),
            *OPTIONS, "--cluster", str(file), "-o", folder,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    end = next(number for number, line in enumerate(lines) if line.endswith("(size=large)"))
    return "\n".join(line.rstrip() for line in lines[:end]).strip("\n")


def page(tables: Sequence[tuple[str, str]]) -> str:
    """Return the whole page."""
    head = (
        "# How many devices BERT-large is worth\n\n"
        "Batch 256 of 512 tokens in bf16, remade by `python benchmarks/device_curve.py`. "
        "Each table is printed by\n\n"
        f"    autopar plan models_zoo/bert.py {' '.join(OPTIONS)} --cluster cluster.toml\n"
    )
    parts = (
        f"\n## {network}\n\n```toml\n{CLUSTER.format(network=network)}```\n\n```text\n{text}\n```\n"
        for network, text in tables
    )
    return head + "".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan for the named networks, or for all if none is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.networks) - set(NETWORKS))
    if unknown:
        parser.error(f"no network {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    tables = []
    for network in given.networks or NETWORKS:
        tables.append((network, printed(network)))
        print(f"{network}\n{tables[-1][1]}", flush=True)
        given.output.write_text(page(tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
