"""A caller whose current stream is another one than the run's, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream


class OtherStream(ComputeStream):
    """The run's, as somebody sees it who is on another: it is the current one inside of what enters it, and nowhere else."""

    def __init__(self) -> None:
        super().__init__(CpuBackend())
        self.inside = False
        self.noted: list[tuple[str, bool]] = []
        """Calls of methods that are watched, and whether they were made inside."""

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
        """From now on these methods of an object or a class note their calls."""
        for name in names:
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, act: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.noted.append((name, self.inside))
            return act(*args, **kwargs)

        return noting

    @property
    def here(self) -> bool:
        return self.inside

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before


__all__ = ["OtherStream"]
