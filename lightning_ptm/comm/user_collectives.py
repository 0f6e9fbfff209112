"""Interception of collectives that a user, a metric or Lightning issues through torch.distributed during a run.

A callback is called before such a collective is issued, so that ranks can agree on it first.

Owns kernels that torch's dispatcher runs before its own for collectives, until `close`. Every call reaches them,
whichever function makes it (one imported by name, a functional collective, a compiled block). Knows calls and process
groups, not what ranks do.

I1: the callback is called before any part of the collective is done, and the collective is issued in the calling
    thread.
I2: not intercepted are collectives of the package's own groups, of groups of one rank, and of threads that a user
    started: such a thread waits for its own collectives, and compute does not depend on their order.
I3: point-to-point messages are not intercepted.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import DispatchKey
from torch.library import Library

from lightning_ptm.comm.agreement import Gathering
from lightning_ptm.torch_internals import GATHER_NAME, SCATTER_NAME, close_library, keys_behind, schema_of

_NAMES = {
    GATHER_NAME: "all_gather",
    SCATTER_NAME: "reduce_scatter",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "monitored_barrier_": "barrier",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "scatter_": "scatter",
}
"""torch's operators of its collectives, and the names that users know."""


class UserCollectives:
    """Intercepts collectives from its construction until `close`.

    Args:
        before: called before each, in the thread that issues it; the caller gets its errors.
        ours: names of the process groups whose collectives are not intercepted.
    """

    def __init__(self, before: Callable[[Gathering], None], ours: Collection[str]) -> None:
        self._before = before
        self._ours = frozenset(ours)
        self._thread = threading.get_ident()
        self._gatherings: dict[tuple[str, str], Gathering | None] = {}
        # Dispatched before the backends' kernels, also in inference mode; torch registers nothing at this key.
        here = DispatchKey.BackendSelect
        self._below = keys_behind(here)
        self._library = Library("c10d", "IMPL")
        for name in _NAMES:
            operator = getattr(torch.ops.c10d, name).default
            place = [argument.name for argument in schema_of(operator).arguments].index("process_group")
            kernel = partial(self._kernel, name, operator, place)
            self._library.impl(name, kernel, here.name, with_keyset=True)

    def close(self) -> None:
        """Removes the kernels. Idempotent."""
        close_library(self._library)

    def _kernel(self, name: str, operator: Any, place: int, keys: Any, *args: Any, **kwargs: Any) -> Any:
        group = dist.ProcessGroup.unbox(args[place])
        if group.group_name not in self._ours and self._is_of_compute():
            gathering = self._gathering(_NAMES[name], group)
            if gathering is not None:
                self._before(gathering)
        return operator.redispatch(keys & self._below, *args, **kwargs)

    def _is_of_compute(self) -> bool:
        """Whether this is the run's thread, or an autograd thread, which Python has not started."""
        return threading.get_ident() == self._thread or isinstance(threading.current_thread(), threading._DummyThread)

    def _gathering(self, name: str, group: dist.ProcessGroup) -> Gathering | None:
        key = (name, group.group_name)
        if key not in self._gatherings:
            text = f"{name} {group.group_name} {dist.get_process_group_ranks(group)}"
            number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")
            self._gatherings[key] = Gathering(number, group.size()) if group.size() > 1 else None
        return self._gatherings[key]
