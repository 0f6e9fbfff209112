"""The copy streams: one to the device and one from it, made here and nowhere else; on a CPU, stand-ins.

Order: a copy starts behind everything that the launching thread's current stream had queued (its source is complete,
its target no longer read), and whoever uses the target next waits on the completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import torch

from lightning_ptm.memory.transfer import Completion, Timer


@dataclass(frozen=True, slots=True)
class Pair:
    """One copy: two uint8 views of equal length."""

    target: torch.Tensor
    source: torch.Tensor


class CopyStream(Protocol):
    """Carries copies out in the order of launching."""

    def mark(self) -> object:
        """The current stream's place now; hand it to `launch` in a thread whose current stream is another one."""

    def launch(self, pairs: Sequence[Pair], behind: object = None) -> Completion:
        """Start copies behind `behind`, or behind this thread's current stream."""


class HostCopies:
    """The CPU's stand-in for a stream: copies are complete when launched."""

    def mark(self) -> object:
        return None

    def launch(self, pairs: Sequence[Pair], behind: object = None) -> Completion:
        began_s = perf_counter()
        for pair in pairs:
            pair.target.copy_(pair.source)
        return _AtOnce(perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class _AtOnce:
    took_s: float

    def done(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def order(self) -> None: ...

    def seconds(self) -> float:
        return self.took_s

    def timer(self) -> Timer:
        return self


class CudaCopies:
    """A CUDA stream for copies in one direction.

    Args:
        device: the CUDA device of the stream.
        own_stream: False launches on the caller's current stream (copies within the device keep its order).
    """

    def __init__(self, device: torch.device, *, own_stream: bool = True) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if own_stream else None

    def mark(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def launch(self, pairs: Sequence[Pair], behind: object = None) -> Completion:
        current = torch.cuda.current_stream(self._device)
        stream = self._stream or current
        if isinstance(behind, torch.cuda.Event):
            stream.wait_event(behind)
        elif stream is not current:
            stream.wait_stream(current)
        started, finished = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            started.record(stream)
            for pair in pairs:
                pair.target.copy_(pair.source, non_blocking=True)
            finished.record(stream)
        return _CudaCompletion(self._device, _CudaTimer(started, finished), tuple(pairs))


@dataclass(frozen=True, slots=True)
class _CudaTimer:
    started: torch.cuda.Event
    finished: torch.cuda.Event

    def done(self) -> bool:
        return self.finished.query()

    def seconds(self) -> float:
        return self.started.elapsed_time(self.finished) / 1000.0


@dataclass(slots=True)
class _CudaCompletion:
    device: torch.device
    times: _CudaTimer
    pairs: tuple[Pair, ...]
    """Keeps sources and targets alive while the copies run."""

    def done(self) -> bool:
        return self.times.done()

    def synchronize(self) -> None:
        self.times.finished.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.times.finished)

    def seconds(self) -> float:
        return self.times.seconds()

    def timer(self) -> Timer:
        return self.times


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """The streams of one device."""

    to_device: CopyStream
    to_host: CopyStream
    within_device: CopyStream
    within_host: CopyStream


def copy_streams(device: torch.device) -> CopyStreams:
    """The copy streams of `device`; all stand-ins on a CPU."""
    host = HostCopies()
    if device.type != "cuda":
        return CopyStreams(host, host, host, host)
    return CopyStreams(CudaCopies(device), CudaCopies(device), CudaCopies(device, own_stream=False), host)
