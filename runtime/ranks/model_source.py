"""Tells model files that have changed since a script was written for them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse


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
    found = _changed(model_file, names, digest)
    if found and mesh.rank == 0:
        say(
            f"note: {found[0]}, whose plan and figures are of what it was\n"
            "  fix: plan again with `autopar plan`"
        )


def refuse_changes(model_file: ModuleType, names: Iterable[str], digest: str) -> None:
    """Leave where the model file is another one by now: the script has forwards of what it was."""
    found = _changed(model_file, names, digest)
    if found:
        refuse(
            f"{found[0]}, which has classes with forwards of what it was",
            fix="plan again with `autopar plan`; where no forward has changed, set MODEL_DIGEST in "
            f'the script to "{found[1]}"',
        )


def _changed(model_file: ModuleType, names: Iterable[str], digest: str) -> tuple[str, str] | None:
    """Return what has changed, if anything, and the digest of the files by now."""
    path = Path(str(model_file.__file__))
    files = [path.parent / name for name in names]
    if not all(file.is_file() for file in files):
        return None
    now = source_digest(files)
    imported = ", or a file that it imports," if len(files) > 1 else ""
    told = f"{path.name}{imported} has changed since this script was written"
    return (told, now) if now != digest else None


def note_device(planned: str, mesh: Mesh) -> None:
    """Say on the first rank that a script which was planned for GPUs runs on a CPU."""
    is_elsewhere = planned != "cpu" and mesh.device.type == "cpu"
    if is_elsewhere and mesh.rank == 0 and not mesh.is_dry_run:
        say(
            f"note: the plan is for {planned}, and this is a CPU: its losses are those of the "
            "plan, its times and memory are not"
        )
