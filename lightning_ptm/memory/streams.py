"""The streams of a run: the one that its own work keeps the order of, and the copy streams, one to the device and one from
it; on a CPU, stand-ins.

Order: a copy starts behind everything that the launching thread's current stream had queued (its source is complete,
its target no longer read), and whoever uses the target next waits on the completion. One whose source the host knows to be
complete, and whose target's pages were taken for it, starts behind what had used these pages before (`Allocator.fill`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from lightning_ptm.memory.backend import Backend, CpuBackend, CurrentStream, Mark, Stream
from lightning_ptm.memory.transfer import Completion, Timer

P = ParamSpec("P")
Result = TypeVar("Result")


class ComputeStream:
    """The stream that a run computes on, and that all it queues by itself keeps the order of.

    A unit may be called on another stream, by its user's choice. What the run does for that call (fetches, releases, sends
    gradients away) is queued here all the same, behind what that stream has queued by then; and that stream goes on behind
    it. So pages and blocks which one call gives back are free for the next, whatever streams both were made on. The price:
    units that are called on several streams compute one after the other.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = backend.current_stream()

    def begin(self) -> None:
        """An iteration starts: from now on it is this thread's current stream.

        Whoever changes that has to order the two, as anywhere. All that the run has queued on the one before, it has with
        that one current, or the one current then goes on behind it (`entered`).
        """
        self._stream = self._backend.current_stream()

    @property
    def here(self) -> bool:
        """Whether it is the current stream of this thread."""
        now = self._backend.current_stream()
        return now is self._stream or now == self._stream

    def entered(self) -> AbstractContextManager[None]:
        """Inside, it is the current stream of this thread."""
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
    """Of an object that has the run's `stream`: it is the current one inside the method, whatever its caller's is."""

    @functools.wraps(method)
    def wrapped(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        stream = self.stream
        if stream.here:  # as nearly always: to enter it would cost more than many a method
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
    """Carries copies out in the order of launching."""

    def mark(self) -> Mark:
        """The current stream's place now; hand it to `launch` in a thread whose current stream is another one."""

    def launch(self, pairs: Sequence[Pair], behind: Sequence[Mark] | None = None) -> Completion:
        """Start copies behind these marks; None: behind this thread's current stream."""


class Copies:
    """Copies in one direction.

    Args:
        backend: of the device that they go to or from.
        stream: that carries them; by default the caller's current one (copies within the device keep its order).
    """

    def __init__(self, backend: Backend, stream: Stream | None = None) -> None:
        self._backend = backend
        self._stream = stream or CurrentStream()

    def mark(self) -> Mark:
        return self._backend.mark()

    def launch(self, pairs: Sequence[Pair], behind: Sequence[Mark] | None = None) -> Completion:
        if behind is None:
            self._stream.follow()
        else:
            for mark in behind:
                self._stream.follow(mark)
        with self._stream.entered():
            started = self._backend.mark(timed=True)
            for pair in pairs:
                pair.target.copy_(pair.source, non_blocking=True)
            finished = self._backend.mark(timed=True)
        return _Launched(_Span(started, finished), tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Span:
    started: Mark
    finished: Mark

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


def copy_streams(backend: Backend) -> CopyStreams:
    """New copy streams of a device; all stand-ins on a CPU."""
    return CopyStreams(
        to_device=Copies(backend, backend.stream()),
        to_host=Copies(backend, backend.stream()),
        within_device=Copies(backend),
        within_host=Copies(CpuBackend()),
    )
