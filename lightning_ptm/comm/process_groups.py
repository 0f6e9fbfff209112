"""The process groups of some ranks: which collectives have been issued on them, and what becomes of one whose rank is gone.

Owns the groups, and what a failed rank leaves for the others on the board: torch's store, which works while collectives hang.

I1: no rank waits for one that has failed: it hangs up (`fail`), or its process's end does, and every collective that it
    is missing from raises `RankError` on the others, with its reason if it could leave one.
I2: parts of these ranks have lines of theirs, and hang up with them.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_ptm.comm.deadlock_detector import DeadlockDetector
from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.torch_internals import default_store

GLOO = "gloo"
_LOOK_S = 0.05
"""How often a rank that was cut short looks who else has come."""


class StoreConnection(Protocol):
    """Connections of other kinds."""

    def close(self) -> None:
        """Whoever waits at the other end sees it. Idempotent."""


T = TypeVar("T", bound=StoreConnection)


class ProcessGroups:
    """This rank's lines to the ranks of `partition` that it is among: a group for data, and one of gloo for agreements.

    Args:
        collectives: the library of the data group.
        timeout: after this long without an answer of the others a collective fails (`RankError`).
        within: of all ranks, of which these are a part.
        partition: every rank once; the same on all ranks, which make all groups. None: all together.
    """

    def __init__(
        self,
        collectives: str,
        timeout: datetime.timedelta,
        *,
        within: ProcessGroups | None = None,
        partition: Sequence[Sequence[int]] | None = None,
    ) -> None:
        partition = partition or [range(dist.get_world_size())]
        self.ranks = next(tuple(ranks) for ranks in partition if dist.get_rank() in ranks)
        """Of all, by their numbers among these."""
        self.rank = self.ranks.index(dist.get_rank())
        self._board = default_store()
        self._failure_key: str = "" if within is None else within._failure_key
        self._parts: list[ProcessGroups] = []

        # State: no group any more once closed.
        self._begun = self._issued = 0
        """Collectives that this rank has begun to issue, and that it has issued."""
        self._data_group: dist.ProcessGroup | None = None
        self._control_group: dist.ProcessGroup | None = None
        self._connections: list[StoreConnection] = []
        for ranks in partition:  # every rank makes all groups, in the same order
            members = None if within is None else list(ranks)
            data = self.guard(lambda: dist.new_group(members, backend=collectives, timeout=timeout))  # noqa: B023
            control = self.guard(lambda: dist.new_group(members, backend=GLOO, timeout=timeout))  # noqa: B023
            if dist.get_rank() in ranks:
                self._data_group, self._control_group = data, control
            del data, control  # the last reference must be `hang_up`'s
        if within is None:
            # Of these lines alone: groups are numbered alike on all ranks.
            self._failure_key = f"lightning_ptm/failure/{self.control.group_name}"
        self.deadlock_detector: DeadlockDetector = (
            DeadlockDetector(self._board, self._failure_key, self.own_rank)
            if within is None
            else within.deadlock_detector
        )
        if within is not None:
            within._parts.append(self)

    @property
    def data(self) -> dist.ProcessGroup:
        return self._still_open(self._data_group)

    @property
    def control(self) -> dist.ProcessGroup:
        return self._still_open(self._control_group)

    def check_open(self) -> None:
        """
        Raises:
            UsageError: this rank has hung up.
        """
        self._still_open(self._control_group)

    def with_connections(self, connections: T) -> T:
        """Further connections of these ranks, which end with the groups; returned."""
        self._connections.append(connections)
        return connections

    def _still_open(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise UsageError(
                f"rank {self.own_rank} has left the collectives of this run, which has ended; start a new one"
            )
        return group

    @property
    def own_rank(self) -> int:
        """Among all ranks."""
        return self.ranks[self.rank]

    def issue(self, collective: Callable[[], Any]) -> Any:
        """Starts a collective, and counts it."""
        self._begun += 1
        result = self.guard(collective)
        self._issued += 1
        return result

    def guard(self, call: Callable[[], Any]) -> Any:
        """Calls it, and turns what a failed collective raises into RankError."""
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, (UsageError, RankError)):
                raise
            # Without its traceback, whose frames name the group and would keep the connections open in `fail`.
            raise RankError(self._explanation(error)) from error.with_traceback(None)

    def _explanation(self, error: RuntimeError) -> str:
        reason = ""
        with contextlib.suppress(Exception):  # the board may be gone with the rank that kept it
            if self._failure_key and self._board.check([self._failure_key]):
                reason = self._board.get(self._failure_key).decode()
        if reason:
            return (
                f"{reason}; a collective needs all ranks, so rank {self.own_rank} stops too; look for the traceback in that "
                f"rank's output"
            )
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return (
            f"a collective of rank {self.own_rank} failed ({first_line}); another rank has probably died or hangs, so this "
            f"one stops; look for the first error among the ranks' logs"
        )

    # -- ranks that fail ----------------------------------------------------------------------------------------------

    def meet(self, word: str | None, within_s: float) -> bool:
        """See `Communicator.meet`."""
        if self._control_group is None:
            return False
        # Ranks that have not issued the same collectives would take one for another from now on.
        everything = (self, *self._parts)
        if word is not None and all(each._begun == each._issued for each in everything):
            word = f"{word}, {[each._issued for each in everything]} collectives"
        else:
            word = None
        keys = [f"{self._failure_key}/met/{rank}" for rank in range(len(self.ranks))]
        verdict_key = f"{self._failure_key}/verdict"
        try:
            agreed = word is not None
            if word is not None:
                self._board.set(keys[self.rank], word)
                until = monotonic() + within_s
                while not self._board.check(keys):
                    known = self._board.check([verdict_key]) or self._board.check([self._failure_key])
                    if known or monotonic() > until:
                        break
                    time.sleep(_LOOK_S)
                agreed = self._board.check(keys) and all(self._board.get(key).decode() == word for key in keys)
            # The first to know decides: another may look when the last one has just come, or not yet.
            return bool(self._board.compare_set(verdict_key, "", "yes" if agreed else "no") == b"yes")
        except RuntimeError:  # the board is gone with the rank that kept it
            return False

    def fail(self, reason: str) -> None:
        """See `Communicator.fail`."""
        if self._control_group is None:
            return
        # The board is gone when its rank's process is. The first reason stays: it is the cause of the others.
        with contextlib.suppress(Exception):
            self._board.compare_set(self._failure_key, "", f"rank {self.own_rank} failed with {reason}")
        self.hang_up()

    @property
    def group_names(self) -> list[str]:
        """Of all groups that collectives are issued on here."""
        groups = [group for each in (self, *self._parts) for group in (each._data_group, each._control_group)]
        return [group.group_name for group in groups if group is not None]

    def hang_up(self) -> None:
        """Destroys all groups, those of parts, too. Not collective. Idempotent."""
        # Dropping the last reference is what closes the groups' connections. Control first: there the others wait.
        communicators = [self, *self._parts]
        for each in communicators:
            for connections in each._connections:
                connections.close()
        for each in communicators:
            control, each._control_group = each._control_group, None
            _destroy(control)
            del control
        for each in communicators:
            data, each._data_group = each._data_group, None
            _destroy(data)
            del data


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
