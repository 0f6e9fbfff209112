"""Which checkpoints a run that is started again may go on from: those in folders, the one that was completed last first.

Reads names and times, no checkpoint. I1: what was never finished is none (folder.py, I1), and what dead writers have left is
removed on the way, by the rule of folder.py that nothing else is. I2: a link and what it names are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_ptm.storage import folder as folders
from lightning_ptm.storage.index import INDEX

SUFFIX = ".ckpt"


def newest_first(places: Iterable[Path]) -> list[Path]:
    """Full checkpoints (files) and sharded ones (folders) in these folders and those below, without links.

    Raises:
        OSError: a folder is there and cannot be read.
    """
    found = {path: _completed_ns(path) for place in places for path in _in(place)}
    times = {path: time for path, time in found.items() if time is not None}
    return sorted(times, key=lambda path: (times[path], path.name), reverse=True)


def _in(place: Path) -> Iterator[Path]:
    if not place.is_dir():
        return
    folders.remove_stale(place)
    for entry in sorted(place.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.suffix == SUFFIX:
            yield entry.resolve()
        elif entry.is_dir() and not entry.is_symlink():
            yield from _in(entry)


def _completed_ns(path: Path) -> int | None:
    """When it was completed; None: it is no checkpoint."""
    try:
        return (path / INDEX if path.is_dir() else path).stat().st_mtime_ns
    except FileNotFoundError:  # a link to nothing, or a folder of somebody else
        return None
