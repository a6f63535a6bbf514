"""Remakes the golden scripts: all, or those that are named."""

from __future__ import annotations

import sys

from tests.codegen.golden.scripts import GOLDEN, golden_path, script_of

for name in sys.argv[1:] or GOLDEN:
    golden_path(name).write_text(script_of(name), encoding="utf-8")
    print(golden_path(name).name)
