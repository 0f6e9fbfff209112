"""Collectives on activations, ordered so that they cannot deadlock with gathers of pages.

A *group* here is all ranks that compute one batch, along whichever axes they exchange: they make the same exchanges in
the same order. Each axis has its own communicator; one gathering, one digest and one list of words serve all of them.

Owns whether the ranks of this rank's group may exchange without agreeing first. A rank that waits in an exchange cannot
take part in a round of agreement (comm/agreement.py), so no other rank may need it there. Ranks of a group run the same
module on the same batch: calls of units, reductions, boundaries and exchanges of tokens come in the same order on all
of them, and none of them passes one before the others. The ranks differ only in which units each has fetched, and so in
when each asks all ranks for an all-gather. A rank may ask only at *occasions*: points in the module's calls that all
ranks of a group reach in the same order (`Executor.occasions` counts them). So one round, a gathering of the group
after the last occasion, shows each rank of the group that the others have asked for all they need. Until the next
occasion they exchange without a round. Ranks of other groups take no part: they wait in their next round until these
ranks reach theirs.

I1: between an occasion and the next exchange there is a gathering of the group. It detects ranks that come to different
    exchanges, or that have exchanged something else since the gathering before: each rank sends a digest of all its
    exchanges, with their layers and batches (`computes`), at no extra cost. Ranks of one machine also send the digest
    with each exchange, and compare it before they read (comm/shm_collectives.py I1). Exchanges after the last gathering
    of a pass are compared at the end of the pass (runtime/ranks/barriers.py I3), before the step; an update that begins
    during the backward may have used them by then.
I2: a collective that the user's code may request on one rank alone is requested between two occasions, or announced by
    `meet_again`, which makes the group gather again before its next exchange.
I3: by I1 and I2, exchanges and all other collectives are issued in the same order on all ranks that take part in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.comm.deadlock_detector import OF_A_BATCH, Exchanged
from lightning_ptm.comm.process_group import Exchange, NearExchange
from lightning_ptm.comm.shm_collectives import ShmCollectives
from lightning_ptm.comm.work import StartedExchange
from lightning_ptm.planning.mesh import Axis, GridAxis
from lightning_ptm.runtime.ranks.barriers import Barriers
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward


class CountsExchanges(Protocol):
    """The counter of points from which this rank may ask others for all-gathers (executor I4)."""

    @property
    def occasions(self) -> int:
        """Number of occasions so far."""


class ActivationExchange:
    """Exchanges of activations of one rank, in one run.

    Args:
        communicators: by axis, of the ranks that exchange along it, for these exchanges only: on the stream of page
            gathers they would queue after those.
        group: index of the group.
        barriers: agreement between ranks.
        executor: counts occasions.
    """

    def __init__(
        self,
        communicators: Mapping[Axis | GridAxis, ProcessGroupCommunicator],
        group: int,
        barriers: Barriers,
        executor: CountsExchanges,
    ) -> None:
        self._communicators = communicators
        self._size = math.prod(each.world_size for each in communicators.values())
        self._group = group
        self._barriers = barriers
        self._executor = executor
        # state
        self._issued = 0
        self._digest = 0
        """Digest of all exchanges and batches so far."""
        self._met: int | None = None
        """Number of occasions at the last gathering of the group."""
        self._since: list[str] = []
        """Descriptions of the exchanges since then; the last may be one that the group is about to gather for."""
        next(iter(communicators.values())).deadlock_detector.ask(self.since_met)  # that of all ranks

    def meet_again(self) -> None:
        """Makes the group gather before its next exchange, since a rank may request an exchange alone.

        Must be called at the same points of a module's calls on all ranks of the group, or where the group gathers for
        the next exchange anyway.
        """
        self._met = None

    def computes(self, batch: str) -> None:
        """Records what the group computes next, as text.

        The next gathering compares this on all ranks of the group, and all raise if it differs.
        """
        self.meet_again()
        what = OF_A_BATCH + batch
        self._digest = crc32(what.encode(), self._digest)
        if self._since and self._since[-1].startswith(OF_A_BATCH):
            del self._since[-1]  # batches may come without exchanges; the digest includes all of them
        self._since.append(what)

    @property
    def issued(self) -> int:
        """Number of exchanges so far."""
        return self._issued

    def largest(self, module: str, numbers: Sequence[float]) -> list[float]:
        """Returns the largest of each number on all ranks of the group. Collective, as an exchange in that module."""
        found = torch.tensor([float(each) for each in numbers])
        for axis, communicator in self._communicators.items():
            of_ranks = found.new_zeros(communicator.world_size, len(found))
            of_ranks[communicator.rank] = found
            found = self.issue(
                axis, module, "question", partial(_summed, of_ranks), of_ranks, partial(_near_sum, of_ranks)
            ).amax(0)
        return found.tolist()

    def done(self) -> int:
        """A 32-bit digest of all that this rank has exchanged."""
        return self._digest

    def since_met(self) -> Exchanged:
        """The group's index, and this rank's exchanges since the group last gathered, including the pending one."""
        return self._group, self._since

    def issue(
        self,
        axis: Axis | GridAxis,
        layer: str,
        name: str,
        collective: Exchange,
        value: Tensor,
        near: NearExchange | None = None,
    ) -> Tensor:
        """Runs a collective along an axis on the current stream, and returns its result.

        Args:
            axis: the axis.
            layer: name of the layer; "": none.
            name: name of the collective.
            collective, near: as the communicator's.
            value: what this rank sends; of one shape and dtype on all ranks of the group.

        Raises:
            RankError: some ranks of the group do not come to it, or another rank has failed.
        """
        self._come(layer, name, value)
        return self._communicators[axis].issue(collective, value, near, self._digest)

    def start(
        self,
        axis: Axis | GridAxis,
        layer: str,
        name: str,
        collective: Exchange,
        value: Tensor,
        near: NearExchange | None = None,
    ) -> StartedExchange:
        """Starts a collective as `issue` runs it. The ranks have gathered for it before it starts, so none of them waits for
        another before all have started it, and it may be waited for at any time."""
        self._come(layer, name, value)
        return self._communicators[axis].start(collective, value, near, self._digest)

    def done_at_once(self, axis: Axis | GridAxis) -> bool:
        """Whether exchanges along an axis are done when `start` returns, so that nothing can be computed meanwhile."""
        return self._communicators[axis].exchanges_at_once

    def _come(self, layer: str, name: str, value: Tensor) -> None:
        """Gathers the group for an exchange if this is needed, and adds the exchange to the digest."""
        phase = "backward" if in_backward() else "forward"
        what = f"the {name} of {layer or 'no layer'} ({phase}, {tuple(value.shape)}, {value.dtype})"
        self._since.append(what)
        if self._met != self._executor.occasions:
            description = f"{self._issued} {self._digest} {what}"
            self._barriers.meet_group(self._group, self._size, description)
            self._met = self._executor.occasions
            self._since = [what]
        self._issued += 1
        self._digest = crc32(what.encode(), self._digest)


def _summed(value: Tensor, group: dist.ProcessGroup, later: bool) -> tuple[Tensor, Any]:
    out = value.clone()
    return out, dist.all_reduce(out, group=group, async_op=later)


def _near_sum(value: Tensor, shm_collectives: ShmCollectives, word: int) -> Tensor:
    return shm_collectives.sum(value, word)
