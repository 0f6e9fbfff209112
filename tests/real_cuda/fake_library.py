"""Stand-in for the fake device's library on a machine with a real one: programs written for the fake one run on that."""

from __future__ import annotations


class _Uncounted:
    """A real device reports no accesses without order."""

    def fc_races(self) -> int:
        return 0


NAME = "cuda"
SAME_KERNELS = False
lib = _Uncounted()
