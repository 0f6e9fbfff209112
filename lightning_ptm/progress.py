"""Progress bars of long work, with bytes and rate, on a terminal only; they disappear when the work is done.

Owns nothing; tqdm draws. I1: nothing is written where there is no terminal, nor for work that ends within `after_s`.
I2: a bar is below bars of other programs (Lightning's), and leaves their lines unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm  # type: ignore[import-untyped]

Seen = Callable[[int], None]
"""Callback with the number of bytes that were just done, called by one thread at a time."""

Begun = Callable[[str], None]
"""Callback with the name of a part of some work when the part begins, which ends the previous part."""

_FORMAT = "{l_bar}{bar}| {n_fmt}B/{total_fmt}B [{elapsed}<{remaining}, {rate_fmt}]"
_PARTS_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def unseen(count: int) -> None:
    """A `Seen` that does nothing, for work without a bar."""


class _Bar(tqdm):
    """Without tqdm's thread, which redraws bars that are updated too seldom: `miniters` is 1, and where memory is short, a
    thread may end while it starts, which Python waits for without an end."""

    monitor_interval = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Settings of progress bars, and functions that show them.

    Args:
        shown: False writes nothing: for ranks other than 0, and a Trainer with `enable_progress_bar=False`.
        after_s: seconds before a bar appears.
        every_s: least seconds between two updates of a bar.
    """

    shown: bool = True
    after_s: float = 1.0
    every_s: float = 0.1

    @contextmanager
    def bar(self, what: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Seen]:
        """Context with a progress bar; yields a function to be called with the number of bytes that were just done.

        Args:
            what: text before the bar.
            done_bytes: bytes that were done before; they do not count for the rate.
        """
        # rich's live display (Lightning's other progress bar) intercepts stderr and prints each line above itself, so
        # every update would print a line. The line below the display is free; rich's original file writes to it.
        terminal = getattr(sys.stderr, "rich_proxied_file", None)
        with _Bar(
            desc=what,
            total=total_bytes,
            initial=done_bytes,
            unit="B",
            unit_scale=True,
            bar_format=_FORMAT,
            dynamic_ncols=True,
            delay=self.after_s,
            mininterval=self.every_s,
            miniters=1,
            leave=False,
            position=None if terminal is None else 1,
            file=terminal or sys.stderr,
            disable=not self._on_a_terminal,
        ) as bar:

            def seen(count: int) -> None:
                # Padding and bytes that are written twice may be counted; tqdm hides the total when it is exceeded.
                bar.update(min(count, total_bytes - bar.n))

            yield seen

    @contextmanager
    def parts(self, what: str, total: int) -> Iterator[Begun]:
        """Context with a bar of `total` parts; yields a function to be called with the name of each part as it begins.
        The bar appears with the first part.

        Args:
            what: text before the bar; the name of the part follows it.
        """
        with _Bar(
            desc=what,
            total=total,
            bar_format=_PARTS_FORMAT,
            dynamic_ncols=True,
            mininterval=self.every_s,
            miniters=1,
            leave=False,
            file=sys.stderr,
            disable=not self._on_a_terminal,
        ) as bar:
            begun = 0

            def begins(part: str) -> None:
                nonlocal begun
                bar.n = min(begun, total)
                begun += 1
                bar.set_postfix_str(part)  # draws the bar, too

            yield begins

    @property
    def _on_a_terminal(self) -> bool:
        return self.shown and sys.stderr is not None and sys.stderr.isatty()

    def line(self, text: str) -> None:
        """Writes one line that stays, above all bars; for any thread."""
        if self._on_a_terminal:
            tqdm.write(text, file=sys.stderr)
