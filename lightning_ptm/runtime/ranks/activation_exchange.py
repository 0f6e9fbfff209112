"""What a tensor group exchanges in a forward or backward, activations, issued so that nobody hangs.

Owns whether the ranks of this rank's group may exchange without asking. A rank that waits in an exchange cannot come to a
round (comm/agreement.py), so no other may need it there. Ranks of a group run the same module on the same batch: calls of
units come in the same order on all of them, and so do reductions, boundaries and exchanges of tokens, which none of them
passes before the others. What differs is which units each has fetched, and so when it asks all ranks for a gather. It may do
so on *occasions* only (`Executor.occasions`), which are the same for all of the group. So one round, a gathering of the group
behind the last occasion, tells each of its ranks that the others have asked what they wanted; from there to the next occasion
they exchange without a word. Ranks of other groups need no part in that: they wait in their next round until these come to
theirs.

I1: between an occasion and the next exchange lies a gathering of the group, which finds ranks that come to different ones, or
have exchanged something else since the one before: each tells a digest of all that it has exchanged, of whose layers, and of
which batches (`computes`), which so costs nothing more. Ranks of one machine tell the digest with each exchange, too, and
compare before they read (comm/shm_collectives.py I1). What is exchanged behind the last gathering of a pass is
compared where the
pass ends (runtime/ranks/barriers.py I3), before the step; an update that begins in the backward may have used it by then.
I2: what the user's code may ask for on one rank alone lies behind an occasion and before another, or counts as that
(`meet_again`). I3: so exchanges and all other collectives are issued in the same order on all ranks that have a part in both.
"""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

from torch import Tensor

from lightning_ptm.comm import ProcessGroupCommunicator
from lightning_ptm.comm.deadlock_detector import OF_A_BATCH, Exchanged
from lightning_ptm.comm.process_group import Exchange, NearExchange
from lightning_ptm.runtime.ranks.barriers import Barriers
from lightning_ptm.runtime.tensors.autograd_graphs import in_backward


class CountsExchanges(Protocol):
    """Who knows from which points on this rank may ask others for all-gathers (executor I4)."""

    @property
    def occasions(self) -> int:
        """How many there were."""


class ActivationExchange:
    """Of one rank, in one run.

    Args:
        communicator: of the group, for its exchanges alone: on the stream of gathers of pages they would be behind these.
        group: its number among the groups.
        rendezvous: where all ranks meet.
        executor: tells occasions.
    """

    def __init__(
        self, communicator: ProcessGroupCommunicator, group: int, barriers: Barriers, executor: CountsExchanges
    ) -> None:
        self._communicator = communicator
        self._group = group
        self._barriers = barriers
        self._executor = executor
        # state
        self._issued = 0
        self._digest = 0
        """Of all exchanges and batches so far."""
        self._met: int | None = None
        """The occasions behind which the group has met."""
        self._since: list[str] = []
        """The exchanges since then, in words; the last one may be one that the group is to meet for."""
        communicator.deadlock_detector.ask(self.since_met)

    def meet_again(self) -> None:
        """The group meets before its next exchange: a rank may ask for that, or for another one, alone. Called at the same
        points of a module's calls on all of the group, or where it meets for the next exchange anyway."""
        self._met = None

    def computes(self, batch: str) -> None:
        """What the group computes next, in words: those of all its ranks are compared when it meets for the next exchange,
        and if they differ, all raise there."""
        self.meet_again()
        what = OF_A_BATCH + batch
        self._digest = crc32(what.encode(), self._digest)
        if self._since and self._since[-1].startswith(OF_A_BATCH):
            del self._since[-1]  # nothing is exchanged in any batch, maybe; the digest has them all
        self._since.append(what)

    def done(self) -> int:
        """A word of 32 bits for all that this rank has exchanged."""
        return self._digest

    def since_met(self) -> Exchanged:
        """The group's number, and what this rank has exchanged since the group has met, and wants to exchange."""
        return self._group, self._since

    def issue(
        self, layer: str, name: str, collective: Exchange, value: Tensor, near: NearExchange | None = None
    ) -> Tensor:
        """What a collective of the group results in, behind what the current stream has queued, before what it queues next.

        Args:
            layer: whose it is; "": none's.
            name: of the collective.
            collective, near: as the communicator's.
            value: what it sends; of one shape and dtype on all of the group.

        Raises:
            RankError: not all of the group come to it, or another rank has failed.
        """
        phase = "backward" if in_backward() else "forward"
        what = f"the {name} of {layer or 'no layer'} ({phase}, {tuple(value.shape)}, {value.dtype})"
        self._since.append(what)
        if self._met != self._executor.occasions:
            told = f"{self._issued} {self._digest} {what}"
            self._barriers.meet_group(self._group, self._communicator.world_size, told)
            self._met = self._executor.occasions
            self._since = [what]
        self._issued += 1
        self._digest = crc32(what.encode(), self._digest)
        return self._communicator.issue(collective, value, near, self._digest)
