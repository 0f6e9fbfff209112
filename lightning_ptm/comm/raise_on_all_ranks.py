"""Raises an error of one rank on all ranks. Knows errors and one small collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lightning_ptm.comm.communicator import Communicator
from lightning_ptm.errors import CheckpointError, FailedElsewhere


@contextmanager
def raise_on_all_ranks(communicator: Communicator, meet: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raises on all ranks what the block raises on one of them. Collective, at the end of the block.

    A `FailedElsewhere`, which only reports the failure of another rank, is replaced by that rank's error.

    Args:
        communicator: of all ranks.
        meet: called before the collective, if other ranks may still be busy with work that needs this rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not communicator.alone:
        meet()
        has_reason = error is not None and not isinstance(error, FailedElsewhere)
        failed = torch.tensor([communicator.rank + 1 if has_reason else 0], dtype=torch.int64)
        first = int(communicator.all_reduce(failed, maximum=True).item())
        if first and not has_reason:
            text = communicator.broadcast_object(None, first - 1)
            raise CheckpointError(f"rank {first - 1}: {text}") from None
        if first:
            communicator.broadcast_object(str(error), first - 1)
    if error is not None:
        raise error
