"""How far long work has come: a bar with bytes and rate on a terminal, gone when the work is done.

Owns nothing; tqdm draws. I1: nothing is written where there is no terminal, nor for work that ends within `after_s`.
I2: a bar is below those that are there already (Lightning's), whoever draws them, and leaves their lines as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm  # type: ignore[import-untyped]

Seen = Callable[[int], None]
"""Is told how many more bytes are done; by one thread at a time."""

Begun = Callable[[str], None]
"""Is told the name of a part of some work that begins now, the one before being done."""

_FORMAT = "{l_bar}{bar}| {n_fmt}B/{total_fmt}B [{elapsed}<{remaining}, {rate_fmt}]"
_PARTS_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


def unseen(count: int) -> None:
    """A `Seen` of work that nobody watches."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What whoever does long work tells of it.

    Args:
        shown: False writes nothing: other ranks than 0, and a Trainer with `enable_progress_bar=False`.
        after_s: how long work has to take before a bar appears.
        every_s: least time between two looks of a bar.
    """

    shown: bool = True
    after_s: float = 1.0
    every_s: float = 0.1

    @contextmanager
    def bar(self, what: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Seen]:
        """Inside, a function to be told how many more bytes of `total_bytes` are done.

        Args:
            what: before the bar.
            done_bytes: that were done before anybody looked; they do not count for the rate.
        """
        # A live display of rich's (Lightning's other bar) takes stderr's lines and prints them above itself, each look of
        # a bar anew. The line below it is nobody's, and is reached through the file that rich has put itself before.
        terminal = getattr(sys.stderr, "rich_proxied_file", None)
        with tqdm(
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
                # Padding and what is written twice may be counted; tqdm forgets the total when there is more.
                bar.update(min(count, total_bytes - bar.n))

            yield seen

    @contextmanager
    def parts(self, what: str, total: int) -> Iterator[Begun]:
        """Inside, a function to be told the name of each of `total` parts as it begins. The bar appears with the first.

        Args:
            what: before the bar; the name of the part is behind it.
        """
        with tqdm(
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
                bar.set_postfix_str(part)  # and draws

            yield begins

    @property
    def _on_a_terminal(self) -> bool:
        return self.shown and sys.stderr is not None and sys.stderr.isatty()

    def line(self, text: str) -> None:
        """One line that stays, above all bars; from any thread."""
        if self._on_a_terminal:
            tqdm.write(text, file=sys.stderr)
