"""Tells model files that have changed since a script was written for them."""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from autopar.runtime.mesh import Mesh


def source_digest(paths: Iterable[Path]) -> str:
    """Return what stands for the text of files, in this order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def note_changes(model_file: ModuleType, names: Iterable[str], digest: str, mesh: Mesh) -> None:
    """Say on the first rank that the model file, or one that it imports, is another one by now.

    The names of the files are seen from the folder of the model file.
    """
    path = Path(str(model_file.__file__))
    files = [path.parent / name for name in names]
    if mesh.rank != 0 or not all(file.is_file() for file in files):
        return
    if source_digest(files) != digest:
        imported = ", or a file that it imports," if len(files) > 1 else ""
        print(
            f"note: {path.name}{imported} has changed since this script was written, whose plan, "
            "figures and classes are of what it was\n"
            "  fix: plan again with `autopar plan`, or change them too",
            file=sys.stderr,
            flush=True,
        )
