"""All-to-alls in the background of training, on a process group and in a thread that nothing else uses.

Owns one gloo group besides all groups of the run. Knows bytes in RAM.

I1: the collectives of training are on other groups, so their order relative to these does not matter: neither is
    mistaken for the other, and neither waits for the other.
I2: it outlives a run that has failed (`Communicator.fail`), since a checkpoint in progress may still be finished. The
    run's communicator closes it, after the last thread that uses it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_ptm.errors import CheckpointError


class AsyncExchange(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Blocks until the bytes have been received."""


class Channel(Protocol):
    """Ranks that can send each other bytes, numbered from 0. One thread at a time."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, AsyncExchange]:
        """Starts an all-to-all; see `Communicator.start_all_to_all`."""


class BackgroundGroup:
    """A `Channel` on a process group of its own.

    Args:
        group: a gloo group that nothing else uses.
        ranks: its ranks, as numbered in the run.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self.rank, self.world_size = group.rank(), group.size()
        self._group: dist.ProcessGroup | None = group

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return "" if self._group is None else self._group.group_name

    def start_all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, AsyncExchange]:
        """Starts an all-to-all; see `Channel`.

        Raises:
            CheckpointError: another rank is gone; `wait` raises it too.
        """
        out = rows.new_empty(sum(received))

        def start() -> Any:
            return dist.all_to_all_single(out, rows, list(received), list(sent), group=self._group, async_op=True)

        return out, _Arriving(self._guard(start), [rows, out], self._guard)

    def close(self) -> None:
        """Destroys the group. Call after the last exchange; idempotent."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _guard(self, call: Callable[[], Any]) -> Any:
        if self._group is None:
            raise CheckpointError(
                "the checkpoint was not completed, because the run ended while ranks still exchanged data for it; "
                "earlier checkpoints are untouched; call trainer.strategy.wait_for_checkpoint() before the run ends"
            )
        try:
            return call()
        except RuntimeError as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"one of the ranks {', '.join(map(str, self._ranks))}, which exchange their parts of parameters for a "
                f"checkpoint, is gone or hangs ({first_line}), so it cannot be finished; look "
                f"for the first error among the ranks' logs"
            ) from error


class _Arriving:
    """An exchange in flight; keeps its buffers alive."""

    def __init__(self, handle: Any, buffers: Sequence[Tensor], guard: Callable[[Callable[[], Any]], Any]) -> None:
        self._handle = handle
        self._buffers = buffers
        self._guard = guard

    def wait(self) -> None:
        self._guard(self._handle.wait)
        self._buffers = ()
