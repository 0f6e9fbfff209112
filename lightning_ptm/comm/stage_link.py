"""Sends and receives of hidden states, and of their gradients, between two neighbouring pipeline stages.

Knows tensors and ranks, not what stages compute. A tensor travels behind a header with its shape and dtype, so that the
receiver needs to know neither.

I1: a send does not wait for its receiver; a receive waits. Each direction between two ranks is a link of its own, with
    process groups of its own, so the order of messages is the order of calls on both ranks.
I2: a sent tensor is kept alive, and must not be changed, until the other rank has taken it (`taken`), or until `finish`.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from lightning_ptm.comm.process_group import ProcessGroupCommunicator
from lightning_ptm.comm.work import Work
from lightning_ptm.errors import UsageError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 8


class StageLink:
    """One direction between this rank and the rank of a neighbouring stage.

    Args:
        communicator: of these two ranks, for this direction only.
        device: where received tensors are.
    """

    def __init__(self, communicator: ProcessGroupCommunicator, device: torch.device) -> None:
        self._communicator = communicator
        self._device = device
        # state
        self._sends: deque[tuple[Work, Work]] = deque()
        self._taken = 0
        """Messages since `finish` that are no longer kept."""

    def send(self, value: Tensor) -> None:
        """Starts to send a tensor to the other rank.

        Raises:
            UsageError: its dtype or its number of dimensions cannot be sent.
        """
        if value.dtype not in _DTYPES or value.dim() > _MOST_DIMENSIONS:
            raise UsageError(
                f"a block gave a tensor of {value.dtype} with {value.dim()} dimensions to the next pipeline stage; let "
                f"blocks return floating-point numbers in at most {_MOST_DIMENSIONS} dimensions"
            )
        header = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64)
        header[0], header[1] = _DTYPES.index(value.dtype), value.dim()
        header[2 : 2 + value.dim()] = torch.tensor(value.shape, dtype=torch.int64)
        announced = self._communicator.announce(header)
        self._sends.append((announced, self._communicator.send(value.contiguous(), 1 - self._communicator.rank)))

    def receive(self) -> Tensor:
        """Waits for the other rank's next tensor, and returns it.

        Raises:
            RankError: that rank has failed, or waits for this one.
        """
        header = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64)
        self._communicator.hear(header, 1 - self._communicator.rank)
        dtype, dimensions, *shape = header.tolist()
        value = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device=self._device)
        self._communicator.receive(value, 1 - self._communicator.rank).wait()
        return value

    def taken(self, count: int) -> None:
        """Frees the first `count` tensors sent since `finish`, which the other rank has taken."""
        while self._taken < count:
            self._taken += 1
            for each in self._sends.popleft():
                each.wait()

    def finish(self) -> None:
        """Waits until everything sent has left."""
        self.taken(self._taken + len(self._sends))
        self._taken = 0

    def forget(self) -> None:
        """Forgets the sends of a step that failed."""
        self._sends.clear()
        self._taken = 0
