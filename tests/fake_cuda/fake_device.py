"""Makes `torch.cuda` the fake device, or a device of another name (FAKE_CUDA_NAME). Imported before torch."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from typing import Any

from fake_library import NAME, REAL, lib

if REAL:
    import torch

    # The same bits each time. The backward of each other attention than the plain one may add in any order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
elif NAME == "cuda":
    import fake_torch_cuda  # noqa: F401
else:
    import fake_torch_module  # noqa: F401


@dataclasses.dataclass(frozen=True)
class HostWait:
    """The host has waited for the device: in which thread, for what, and on which lines."""

    thread: int
    what: str
    where: str


def host_waits(since: int = 0) -> list[HostWait]:
    """All waits of the host for the device from the number `since` on, whether or not there was anything to wait for."""
    return [
        HostWait(lib.fc_wait_thread(at), lib.fc_wait_what(at).decode(), lib.fc_wait_where(at).decode())
        for at in range(since, lib.fc_waits())
    ]


def watch_files() -> None:
    """Tells the race detector what files read and write of page-locked memory, which no operator does."""
    if REAL:
        return
    from lightning_ptm.memory import disk

    def tell(buffer: memoryview, *, writes: bool, what: bytes) -> None:
        if len(buffer) and not buffer.readonly:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            lib.fc_host_access(address, len(buffer), int(writes), what)

    def preadv(self: Any, file: int, buffers: Any, offset: int) -> int:
        for buffer in buffers:
            tell(buffer, writes=True, what=b"preadv")
        return os.preadv(file, buffers, offset)

    def pwritev(self: Any, file: int, buffers: Any, offset: int) -> int:
        for buffer in buffers:
            tell(buffer, writes=False, what=b"pwritev")
        return os.pwritev(file, buffers, offset)

    disk.FileOps.preadv, disk.FileOps.pwritev = preadv, pwritev  # type: ignore[method-assign]


def watch_update_thread(elements_per_s: float) -> None:
    """Gives the thread that updates a time of its own (FAKE_CUDA_CLOCK), which it and others come to where one waits for the
    other.

    Args:
        elements_per_s: of its arithmetic in RAM.
    """
    from lightning_ptm.memory.transfer import StreamTransfer
    from lightning_ptm.terms import Tier
    from lightning_ptm.update.arithmetic import Arithmetic
    from lightning_ptm.update.pipeline import Wait
    from lightning_ptm.update.update_job import JobHandle
    from lightning_ptm.update.updater import _GRADIENT_WATCH_S, Updater

    work, command, arithmetic, look = Updater._work, Updater._command, Arithmetic.update, Updater._wait_or_command
    mark_done, done, block = JobHandle.mark_done, JobHandle.done, JobHandle.block
    transfer_done, transfer_wait = StreamTransfer.done, StreamTransfer.wait
    go_on, wait_for = Updater._go_on, Updater._await
    ended_s: dict[JobHandle, float] = {}
    later: list[tuple[float, Any]] = []
    """Commands that this thread has not come to, and their times."""
    came_s = [0.0]
    """The time of this thread."""
    awaited: list[None] = []
    """An entry for each thread that waits for this one."""

    def in_own_time(self: Any, cores: Any) -> None:
        lib.fc_clock_own(1)
        try:
            work(self, cores)
        finally:
            while later:
                later.pop(0)[1]()
            lib.fc_clock_own(0)

    def told(self: Any, what: Any) -> None:
        told_s = lib.fc_clock_host()

        def hears() -> None:
            if self._thread is threading.current_thread() and (later or self._pipeline.busy):
                later.append((told_s, what))  # this thread has work until then
            else:
                lib.fc_clock_come_to(told_s)
                what()

        command(self, hears)

    def others_come(self: Any) -> bool:
        """Lets others come to this thread's time, or wait for it: until then they may have jobs for an earlier time.

        Returns:
            Whether they had some.
        """
        own_s, known_s, deadline_s = lib.fc_clock_host(), -1.0, 0.0
        came_s[0] = own_s
        while self._commands.empty() and not awaited and not self._stopping.is_set():
            others_s, now_s = lib.fc_clock_others(), time.perf_counter()
            if others_s >= own_s or (others_s == known_s and now_s > deadline_s):
                return False
            if others_s != known_s:
                known_s, deadline_s = others_s, now_s + 0.5
            time.sleep(0.0002)
        return not self._commands.empty()

    def obeys(self: Any) -> None:
        while later and (later[0][0] <= lib.fc_clock_host() or not self._pipeline.busy):
            told_s, what = later.pop(0)
            lib.fc_clock_come_to(told_s)
            what()

    def goes_on(self: Any, handle: Any, wait: Any) -> None:
        if self._thread is not threading.current_thread():
            go_on(self, handle, wait)
            return
        obeys(self)
        if not others_come(self) and self._pipeline.busy:
            go_on(self, handle, wait)
        obeys(self)

    def awaits(self: Any, *args: Any) -> None:
        awaited.append(None)
        try:
            wait_for(self, *args)
        finally:
            awaited.pop()

    def looks(self: Any, blocker: Any) -> None:
        looked_s = lib.fc_clock_host()
        if blocker.cause is not Wait.GRADIENT or not isinstance(blocker.pending, StreamTransfer):
            look(self, blocker)
        if blocker.cause is Wait.GRADIENT:
            lib.fc_clock_come_to(looked_s + _GRADIENT_WATCH_S)

    def takes_time(self: Any, progress: Any, start: int, numel: int, *args: Any, **known: Any) -> None:
        arithmetic(self, progress, start, numel, *args, **known)
        if progress.tier is not Tier.DEVICE:  # there it takes the device's time
            lib.fc_clock_come_to(lib.fc_clock_host() + numel / elements_per_s)

    def ended(self: Any) -> None:
        ended_s[self] = lib.fc_clock_host()
        mark_done(self)

    def is_done(self: Any) -> bool:
        deadline_s = time.perf_counter() + 0.5
        while not done(self) and came_s[0] < lib.fc_clock_host() and time.perf_counter() < deadline_s:
            time.sleep(0.0002)  # what this thread does until then, it may not have done yet
        return done(self) and bool(lib.fc_clock_has_come(ended_s[self]))

    def blocks(self: Any, timeout_s: float | None = None) -> bool:
        has_ended = block(self, timeout_s)
        if has_ended:
            lib.fc_clock_come_to(ended_s[self])
        return has_ended

    # Whoever looks first ends a transfer for all, at a time that is not that of others.
    def has_landed(self: Any) -> bool:
        return transfer_done(self) and self._completion.done()

    def lands(self: Any, host: bool = True) -> None:
        if host:
            self._completion.synchronize()
        transfer_wait(self, host)

    Updater._work, Updater._command, Arithmetic.update = in_own_time, told, takes_time  # type: ignore[method-assign]
    Updater._wait_or_command = looks  # type: ignore[method-assign]
    Updater._go_on, Updater._await = goes_on, awaits  # type: ignore[method-assign]
    JobHandle.mark_done, JobHandle.done, JobHandle.block = ended, is_done, blocks  # type: ignore[method-assign]
    StreamTransfer.done, StreamTransfer.wait = has_landed, lands  # type: ignore[method-assign]
