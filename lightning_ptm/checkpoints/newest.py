"""Which checkpoints a run that is started again may go on from: those in folders, the one that was completed last first.

Reads names and times, no checkpoint. I1: what was never finished is none (folder.py, I1), and what dead writers have left is
removed on the way, by the rule of folder.py that nothing else is. I2: a link and what it names are one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.index import INDEX
from lightning_ptm.storage.reading import is_file, is_folder

SUFFIX = ".ckpt"


def newest_first(places: Iterable[Path], suffixes: Collection[str] = (SUFFIX,)) -> list[Path]:
    """Full checkpoints (files) and sharded ones (folders) in these folders and those below, without links.

    Args:
        suffixes: of their names.

    Raises:
        OSError, CheckpointError: a folder is there and cannot be read.
    """
    found = {path: _completed_ns(path) for place in places for path in _in(place, suffixes)}
    times = {path: time for path, time in found.items() if time is not None}
    return sorted(times, key=lambda path: (times[path], path.name), reverse=True)


def _in(place: Path, suffixes: Collection[str]) -> Iterator[Path]:
    if not place.is_dir():
        return
    folders.remove_stale(place)
    for entry in sorted(place.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.suffix in suffixes:
            yield Path(os.path.realpath(entry))  # links in a circle name nothing, and Path.resolve raises for them
        elif entry.is_dir() and not entry.is_symlink():
            yield from _in(entry, suffixes)


def _completed_ns(path: Path) -> int | None:
    """When it was completed; None: it is no checkpoint, but a link to nothing, a pipe, or a folder of somebody else's."""
    file = path / INDEX if is_folder(path) else path
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it since
        if is_file(file):
            return file.stat().st_mtime_ns
    return None
