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
        lines: the process groups.
        timeout: after this long without an answer of the others, waiting fails.
        rounds: make connections for rows of rounds.
        exchanges: make connections for activations in RAM.
    """

    def __init__(self, lines: ProcessGroups, timeout: datetime.timedelta, *, rounds: bool, exchanges: bool) -> None:
        self._lines = lines
        self.rounds: UdsConnections | None = None
        self.exchanges: ShmCollectives | None = None
        rank, size = lines.rank, len(lines.ranks)
        found = connected(rank, size, timeout, self._gathered) if rounds else None
        if found is not None:
            self.rounds = lines.with_connections(found[0])
        if exchanges:
            near = shm_collectives(rank, size, timeout, self._gathered, self._wait, self._differ)
            self.exchanges = None if near is None else lines.with_connections(near)

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * len(self._lines.ranks)
        # Not counted as issued: some subgroups may need fewer of these collectives than others.
        self._lines.guard(lambda: dist.all_gather_object(values, value, group=self._lines.control))
        return values

    def _wait(self, work: Any) -> None:
        self._lines.deadlock_detector.in_exchange(work, self._lines.ranks)

    def _differ(self, connections: UdsConnections) -> NoReturn:
        words = connections.tell_text(json.dumps(self._lines.deadlock_detector.exchanged()))
        told = dict(zip(self._lines.ranks, map(json.loads, words), strict=True))
        reason = f"rank {self._lines.own_rank} and another rank of its tensor group have come to different exchanges"
        raise RankError(explained(reason, told))
