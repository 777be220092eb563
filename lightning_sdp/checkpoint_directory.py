"""A checkpoint that is a directory: when it is complete, and how it takes its place.

It is written beside its place and moved there when it is complete; what was there before is removed last. Whoever is
killed on the way leaves the earlier checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

META = "meta.pt"
INDEX = ".metadata"  # torch's list of what is in which file


def beside(path: Path, what: str) -> Path:
    """A hidden path in the same directory as another one."""
    return path.with_name(f".{path.name}.{what}")


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a directory with a checkpoint, or with what is left of one."""
    if not path.is_dir():
        return False
    names = [child.name for child in path.iterdir()]
    return META in names or INDEX in names or any(name.endswith(".distcp") for name in names)


def prepare(path: Path, unfinished: Path) -> None:
    """Makes an empty directory for a checkpoint that is going to another place.

    Raises:
        ValueError: The place is not a local one, or has something in it that is no checkpoint.
    """
    if "://" in str(path) or ":/" in str(path):
        raise ValueError(
            f"A checkpoint cannot be saved to {path} with save_distributed_checkpoint=True: name a directory in a "
            "file system that all processes share."
        )
    if path.is_dir() and not is_checkpoint(path) and any(path.iterdir()):
        raise ValueError(
            f"A checkpoint cannot be saved to {path}: it would replace a directory with other files. Choose another "
            "name."
        )
    _remove(unfinished)
    unfinished.mkdir(parents=True)


def move(source: Path, path: Path) -> None:
    """Moves a complete file or directory to its place; what was there before is removed last."""
    previous = beside(path, "previous")
    if os.path.lexists(path):
        _remove(previous)
        path.rename(previous)
    source.rename(path)
    _remove(previous)


def recover(path: Path) -> None:
    """Puts a checkpoint back that was about to be replaced when a run was killed."""
    previous = beside(path, "previous")
    if previous.exists() and not os.path.lexists(path):
        previous.rename(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_complete(path: Path) -> None:
    """Refuses a directory that lacks one of the two files that say what is in it.

    Raises:
        ValueError: It does.
    """
    for name in (META, INDEX):
        if not (path / name).is_file():
            raise ValueError(_incomplete(path, f"it has no {name}"))


def require_files(path: Path, ends: Mapping[str, int]) -> None:
    """Refuses a directory in which data is missing.

    Args:
        path: The directory.
        ends: The bytes that each file has to have at least, by its name.

    Raises:
        ValueError: A file is missing or too short.
    """
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            raise ValueError(_incomplete(path, f"{name} is missing"))
        if file.stat().st_size < end:
            raise ValueError(_incomplete(path, f"{name} is cut off"))


def _incomplete(path: Path, why: str) -> str:
    return (
        f"The checkpoint {path} is incomplete: {why}. Saving or removing it was interrupted, or processes do not share "
        "its file system. Use another checkpoint."
    )
