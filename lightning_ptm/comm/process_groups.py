"""The process groups of some ranks, the count of collectives issued on them, and the handling of failed ranks.

Owns the groups, and the reason of a failed rank in torch's store, which works while collectives hang.

I1: no rank waits for a rank that has failed. The failed rank closes its connections (`fail`), or the end of its process
    does. Every collective that it is missing from then raises `RankError` on the others, with its reason if it could
    post one.
I2: subgroups of these ranks have a ProcessGroups of their own, and are closed with this one.
I3: no small message waits behind the bytes of pages. A thread of gloo moves the bytes of all groups that have its device:
    control groups share one, links between stages another, and each data group has its own. Idle threads cost time, too.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from lightning_ptm.comm.deadlock_detector import DeadlockDetector
from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.torch_internals import default_store, gloo_devices, gloo_groups_on

GLOO = "gloo"
_LOOK_S = 0.05
"""Seconds between two looks of an interrupted rank at the store."""


class Closeable(Protocol):
    """A connection of another kind that is closed with the groups."""

    def close(self) -> None:
        """Closes the connection, which ends the waiting of other ranks. Idempotent."""


T = TypeVar("T", bound=Closeable)


class ProcessGroups:
    """The two process groups of this rank with some ranks: one for data, and one of gloo for agreements.

    Args:
        collectives: torch's name of the data group's backend.
        timeout: after this long without an answer of the others a collective fails (`RankError`).
        within: the groups of all ranks, of which these are a part; None: these are of all ranks.
        partition: every rank once; the same on all ranks, which make all groups. None: one group of all ranks.
        one_way: whether one rank sends, and does not wait for the other.
    """

    def __init__(
        self,
        collectives: str,
        timeout: datetime.timedelta,
        *,
        within: ProcessGroups | None = None,
        partition: Sequence[Sequence[int]] | None = None,
        one_way: bool = False,
    ) -> None:
        self._one_way = one_way
        partition = partition or [range(dist.get_world_size())]
        self.ranks = next(tuple(ranks) for ranks in partition if dist.get_rank() in ranks)
        """Ranks of these groups: global rank by rank within the groups."""
        self.rank = self.ranks.index(dist.get_rank())
        self._store = default_store()
        self._shared_devices: tuple[list[Any], list[Any]] = (
            (gloo_devices(), gloo_devices()) if within is None else within._shared_devices
        )
        """The devices of gloo that control groups share, and those that links between pipeline stages share (I3)."""
        self._failure_key: str = "" if within is None else within._failure_key
        self._parts: list[ProcessGroups] = []

        # State. The groups are None once closed.
        self._begun = self._issued = 0
        """Collectives that this rank has begun to issue, and that it has issued."""
        self._data_group: dist.ProcessGroup | None = None
        self._control_group: dist.ProcessGroup | None = None
        self._connections: list[Closeable] = []
        for ranks in partition:  # every rank makes all groups, in the same order
            members = None if within is None else list(ranks)
            shared = gloo_groups_on(self._shared_devices[one_way])
            with nullcontext() if len(ranks) > 1 and not one_way else shared:
                data = self.guard(lambda: dist.new_group(members, backend=collectives, timeout=timeout))  # noqa: B023
            with gloo_groups_on(self._shared_devices[one_way]):
                control = self.guard(lambda: dist.new_group(members, backend=GLOO, timeout=timeout))  # noqa: B023
            if dist.get_rank() in ranks:
                self._data_group, self._control_group = data, control
            del data, control  # `close` must drop the last reference, which closes the connections
        if within is None:
            # Unique to this run, and equal on all ranks, since torch numbers groups alike on all of them.
            self._failure_key = f"lightning_ptm/failure/{self.control.group_name}"
        self.deadlock_detector: DeadlockDetector = (
            DeadlockDetector(self._store, self._failure_key, self.own_rank)
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
        """Raises UsageError if the groups are closed."""
        self._still_open(self._control_group)

    def add_connections(self, connections: T) -> T:
        """Registers further connections of these ranks, to be closed with the groups; returns them."""
        self._connections.append(connections)
        return connections

    def _still_open(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        if group is None:
            raise UsageError(
                f"rank {self.own_rank}: this run has ended, so no collective of it can be called; start a new fit"
            )
        return group

    @property
    def own_rank(self) -> int:
        """Global rank of this process."""
        return self.ranks[self.rank]

    def issue(self, collective: Callable[[], Any]) -> Any:
        """Starts a collective, and counts it."""
        self._begun += 1
        result = self.guard(collective)
        self._issued += 1
        return result

    def guard(self, call: Callable[[], Any]) -> Any:
        """Calls `call`, and turns the error of a failed collective into RankError."""
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, (UsageError, RankError)):
                raise
            # Without its traceback, whose frames refer to the group and would keep its connections open after `fail`.
            raise RankError(self._explanation(error)) from error.with_traceback(None)

    def _explanation(self, error: RuntimeError) -> str:
        reason = ""
        with contextlib.suppress(Exception):  # the rank that hosts the store may be gone
            if self._failure_key and self._store.check([self._failure_key]):
                reason = self._store.get(self._failure_key).decode()
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
        """Returns whether all ranks call this with the same word in time; see `Communicator.meet`."""
        if self._control_group is None:
            return False
        # Ranks that have issued different numbers of collectives would mismatch all later ones.
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
                self._store.set(keys[self.rank], word)
                until = monotonic() + within_s
                while not self._store.check(keys):
                    known = self._store.check([verdict_key]) or self._store.check([self._failure_key])
                    if known or monotonic() > until:
                        break
                    time.sleep(_LOOK_S)
                agreed = self._store.check(keys) and all(self._store.get(key).decode() == word for key in keys)
            # The first rank with an answer decides for all: the last rank may come between the looks of two others.
            return bool(self._store.compare_set(verdict_key, "", "yes" if agreed else "no") == b"yes")
        except RuntimeError:  # the rank that hosts the store is gone
            return False

    def fail(self, reason: str) -> None:
        """Reports a failure to the other ranks; see `Communicator.fail`."""
        if self._control_group is None:
            return
        # The store may be gone with the rank that hosts it. Only the first reason is kept: it caused the others.
        with contextlib.suppress(Exception):
            self._store.compare_set(self._failure_key, "", f"rank {self.own_rank} failed with {reason}")
        self.close()

    @property
    def group_names(self) -> list[str]:
        """Names of all groups that collectives are issued on, including those of subgroups."""
        groups = [group for each in (self, *self._parts) for group in (each._data_group, each._control_group)]
        return [group.group_name for group in groups if group is not None]

    def close(self) -> None:
        """Destroys all groups, including those of subgroups. Not collective. Idempotent."""
        # Dropping the last reference closes a group's connections. Control groups first: the other ranks wait there.
        communicators = [self, *self._parts]
        for each in communicators:
            for connections in each._connections:
                connections.close()
        for each in communicators:
            control, each._control_group = each._control_group, None
            _destroy(control)
            if each._one_way:
                # Blocks while a message is under way that its receiver may never take.
                held = [control]
                del control
                threading.Thread(target=held.clear, daemon=True, name="close a stage's link").start()
            else:
                del control
        for each in communicators:
            data, each._data_group = each._data_group, None
            _destroy(data)
            del data
            each._shared_devices = ([], [])  # their threads end with the last group


def _destroy(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
