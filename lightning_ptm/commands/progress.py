"""A progress bar for commands that read or write many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function to be told how many more bytes are done. Shows nothing where there is no terminal to show it on."""
    with tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def seen(count: int) -> None:
            bar.update(count)

        yield seen
