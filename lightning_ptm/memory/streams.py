"""The streams of a run: the compute stream, and one copy stream to and one from the device; stand-ins on a CPU.

Order: a copy starts after everything that the launching thread's current stream had queued (so its source is complete
and its target is no longer read), and the next user of the target waits on the completion. An exception is a copy whose
source is known to be complete and whose target pages were allocated for it: it only waits for the last use of those
pages (`Allocator.fill`), which may be a copy that still leaves them (`Transfer.hand_over`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from lightning_ptm.memory.backend import Backend, CpuBackend, CurrentStream
from lightning_ptm.memory.device_work import Completion, DeviceEvent, Stream, Timer

P = ParamSpec("P")
Result = TypeVar("Result")


class ComputeStream:
    """The stream that a run computes on, and on which the runtime queues all of its own work.

    Users may call a unit on another stream. The runtime's work for that call (fetches, releases, gradient offload) is
    still queued on the compute stream: the compute stream first waits for the other stream, and the other stream then
    waits for the compute stream. So pages and blocks that one call frees can be reused by the next, on whatever stream
    it runs. The price: units called on several streams compute one after the other.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = backend.current_stream()

    def begin(self) -> None:
        """Makes this thread's current stream the compute stream of the iteration that starts.

        A user who changes the current stream must order the two streams, as usual. The runtime queued all earlier work
        with the previous compute stream as the current one, or made the stream current at that time wait for it
        (`entered`).
        """
        self._stream = self._backend.current_stream()

    @property
    def here(self) -> bool:
        """Whether the compute stream is the current stream of this thread."""
        if isinstance(self._stream, CurrentStream):
            return True  # a device without streams
        now = self._backend.current_stream()
        return now is self._stream or now == self._stream

    def entered(self) -> AbstractContextManager[None]:
        """Makes the compute stream the current stream of this thread inside the context."""
        return nullcontext() if self.here else self._joined()

    @contextmanager
    def _joined(self) -> Iterator[None]:
        stream = self._stream
        stream.follow()
        try:
            with stream.entered():
                yield
        finally:
            stream.join()


class _Computes(Protocol):
    stream: ComputeStream


Owner = TypeVar("Owner", bound=_Computes)


def on_compute_stream(method: Callable[Concatenate[Owner, P], Result]) -> Callable[Concatenate[Owner, P], Result]:
    """Decorator of methods of an object with a `stream`: runs them with the compute stream as the current stream."""

    @functools.wraps(method)
    def wrapped(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        stream = self.stream
        if stream.here:  # the common case; entering the stream would cost more than many of the methods
            return method(self, *args, **kwargs)
        with stream.entered():
            return method(self, *args, **kwargs)

    return wrapped


@dataclass(frozen=True, slots=True)
class Pair:
    """One copy: two uint8 views of equal length."""

    target: torch.Tensor
    source: torch.Tensor


class CopyStream(Protocol):
    """Runs copies in the order of their launches."""

    def mark(self) -> DeviceEvent:
        """Returns the current stream's position, to pass to `launch` in a thread with another current stream."""

    def launch(self, pairs: Sequence[Pair], after: Sequence[DeviceEvent] | None = None) -> Completion:
        """Starts copies after the marks `after`; None: after everything queued on this thread's current stream."""


class Copies:
    """Copies in one direction.

    Args:
        backend: the device that they go to or from.
        stream: stream to run on; None: the caller's current stream (copies within the device keep its order).
    """

    def __init__(self, backend: Backend, stream: Stream | None = None) -> None:
        self._backend = backend
        self._stream = stream or CurrentStream()

    def mark(self) -> DeviceEvent:
        return self._backend.mark()

    def launch(self, pairs: Sequence[Pair], after: Sequence[DeviceEvent] | None = None) -> Completion:
        if after is None:
            self._stream.follow()
        else:
            for mark in after:
                self._stream.follow(mark)
        with self._stream.entered():
            started = self._backend.mark(timed=True)
            for pair in pairs:
                pair.target.copy_(pair.source, non_blocking=True)
            finished = self._backend.mark(timed=True)
        return _Launched(_Span(started, finished), tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Span:
    started: DeviceEvent
    finished: DeviceEvent

    def done(self) -> bool:
        return self.finished.done()

    def seconds(self) -> float:
        return self.finished.seconds_since(self.started)


@dataclass(slots=True)
class _Launched:
    times: _Span
    pairs: tuple[Pair, ...]
    """Keeps sources and targets alive while the copies run."""

    def done(self) -> bool:
        return self.times.done()

    def synchronize(self) -> None:
        self.times.finished.synchronize()

    def order(self) -> None:
        self.times.finished.order()

    def end(self) -> DeviceEvent:
        return self.times.finished

    def seconds(self) -> float:
        return self.times.seconds()

    def timer(self) -> Timer:
        return self.times


@dataclass(frozen=True, slots=True)
class CopyStreams:
    """The copy streams of one device."""

    to_device: CopyStream
    to_host: CopyStream
    within_device: CopyStream
    within_host: CopyStream


def copy_streams(backend: Backend) -> CopyStreams:
    """Returns new copy streams of a device; on a CPU all are stand-ins."""
    return CopyStreams(
        to_device=Copies(backend, backend.stream()),
        to_host=Copies(backend, backend.stream()),
        within_device=Copies(backend),
        within_host=Copies(CpuBackend()),
    )
