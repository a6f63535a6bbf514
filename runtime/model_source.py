"""Tells a model file that has changed since a script was written for it."""

import hashlib
import sys
from pathlib import Path
from types import ModuleType

from autopar.runtime.mesh import Mesh


def source_digest(path: Path) -> str:
    """Return what stands for the text of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def note_changes(model_file: ModuleType, digest: str, mesh: Mesh) -> None:
    """Say on the first rank that the model file is another one than was planned by now."""
    path = Path(str(model_file.__file__))
    if mesh.rank == 0 and path.is_file() and source_digest(path) != digest:
        print(
            f"note: {path.name} has changed since this script was written, whose plan, figures and "
            "classes are of what it was\n  fix: plan again with `autopar plan`, or change them too",
            file=sys.stderr,
            flush=True,
        )
