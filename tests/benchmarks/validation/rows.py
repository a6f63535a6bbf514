"""Makes rows of tables of published runs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.validation.table import COLUMNS, Row, read_table

USUAL = {
    "source": "a test",
    "model_name": "gpt-small",
    "model_family": "gpt",
    "layers": "4",
    "hidden": "256",
    "ffn_hidden": "1024",
    "heads": "4",
    "kv_heads": "4",
    "vocab": "512",
    "seq_len": "128",
    "gpu": "A100-80GB-SXM",
    "gpus": "4",
    "gpus_per_node": "4",
    "dtype": "bf16",
    "tp": "2",
    "sp": "False",
    "cp": "1",
    "pp": "1",
    "dp": "2",
    "fsdp": "none (DDP)",
    "micro_batch": "2",
    "global_batch": "8",
    "recompute": "none",
    "flash_attention": "True",
    "iteration_time_s": "0.05",
}


def table_text(*rows: dict[str, str], columns: tuple[str, ...] = tuple(COLUMNS)) -> str:
    """Return a table whose rows are the usual one with some cells changed."""
    lines = [",".join(columns)]
    for row in rows:
        cells = {**USUAL, **row}
        lines.append(",".join(f'"{cells.get(name, "")}"' for name in columns))
    return "\n".join(lines) + "\n"


def a_row(folder: Path, **changes: str) -> Row:
    """Return the usual row with some cells changed, as the table's reader gives it."""
    path = folder / "runs.csv"
    path.write_text(table_text(changes), encoding="utf-8")
    (row,) = read_table(path)
    return row
