"""Connections between ranks of one machine that bypass process groups: sockets for rounds, shared memory for exchanges.

Owns the decision whether they exist, which all ranks take together, and the error of ranks whose exchanges differ.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_ptm.comm.deadlock_detector import explained
from lightning_ptm.comm.process_groups import ProcessGroups
from lightning_ptm.comm.shm_collectives import ShmCollectives, shm_collectives
from lightning_ptm.comm.uds import UdsConnections, connected
from lightning_ptm.errors import RankError


class IntraNode:
    """The direct connections between the ranks of some process groups. They are closed with the groups. Collective.

    Args:
        process_groups: the process groups.
        timeout: after this long without an answer of the others, waiting fails.
        rounds: make connections for rows of rounds.
        exchanges: make connections for activations in RAM.
    """

    def __init__(
        self, process_groups: ProcessGroups, timeout: datetime.timedelta, *, rounds: bool, exchanges: bool
    ) -> None:
        self._groups = process_groups
        self.rounds: UdsConnections | None = None
        self.exchanges: ShmCollectives | None = None
        rank, size = process_groups.rank, len(process_groups.ranks)
        found = connected(rank, size, timeout, self._all_gather_object) if rounds else None
        if found is not None:
            self.rounds = process_groups.add_connections(found[0])
        if exchanges:
            near = shm_collectives(rank, size, timeout, self._all_gather_object, self._wait, self._raise_difference)
            self.exchanges = None if near is None else process_groups.add_connections(near)

    def _all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * len(self._groups.ranks)
        # Not counted as issued: some subgroups may need fewer of these collectives than others.
        self._groups.guard(lambda: dist.all_gather_object(values, value, group=self._groups.control))
        return values

    def _wait(self, work: Any) -> None:
        self._groups.deadlock_detector.in_exchange(work, self._groups.ranks)

    def _raise_difference(self, connections: UdsConnections) -> NoReturn:
        words = connections.all_gather_text(json.dumps(self._groups.deadlock_detector.exchanged()))
        exchanged_by_rank = dict(zip(self._groups.ranks, map(json.loads, words), strict=True))
        reason = (
            f"rank {self._groups.own_rank} and another rank that computes its batch have come to different exchanges"
        )
        raise RankError(explained(reason, exchanged_by_rank))
