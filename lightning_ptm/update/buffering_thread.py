"""The buffering thread of lock-free mode: owner of the buffers between compute and the updating thread (Algorithm 2).

Owns the thread and the queue of messages to it. Gradients and parameter versions are in lock_free_buffers.py; reads,
arithmetic and writes are the updater's, which runs in its own thread.
I1: compute and the updating thread only put messages into the queue; this thread alone touches the buffers.
I2: after an error in either thread nothing is updated any more, and every later call from compute raises that error.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lightning_ptm.errors import InternalError
from lightning_ptm.memory.core_limits import use_cores
from lightning_ptm.planning.version_policy import Begin
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, LockFreeBuffers, Version, combined
from lightning_ptm.update.shadow import GroupValues, ShadowOptimizer
from lightning_ptm.update.update_job import JobHandle, UpdateJob
from lightning_ptm.update.updater import Updater
from lightning_ptm.update.weight_prediction import WeightPrediction

if TYPE_CHECKING:
    from lightning_ptm.memory.paged_tensor import PagedTensor

_LOOK_S = 0.1
"""Interval at which a waiting thread checks that the threads that it waits for are alive."""
_DRAIN_LOOK_S = 0.005
"""Interval at which a drain looks for versions; it may miss the notification of one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LockFreeFlat:
    """Flat as the buffering thread sees it: its buffer, its master states, and the optimizer that updates them."""

    buffer: FlatBuffer
    states: FlatStates
    shadow: ShadowOptimizer


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """Numbers of one flat's gradient contributions: received, applied and pending."""

    name: str
    received: int
    applied: int
    pending: int


class BufferingThread:
    """Takes gradients from compute, has the updater apply them, and publishes the new parameter versions.

    Args:
        updater: not running yet; runs in its own thread between `start` and `stop`. Closed by its owner.
        flats: the flats, in the order in which a forward pass uses them; methods name a flat by its index here.
        spares: pages for new versions.
        room: chunks that all running jobs may have at once, about.
        cores: CPU cores that the updater's arithmetic may use, and this thread's.
        learns: whether updates learn weight predictions from the first update on.
    """

    def __init__(
        self,
        updater: Updater,
        flats: Sequence[LockFreeFlat],
        spares: Iterable[PagedTensor],
        *,
        room: int,
        cores: int,
        learns: bool = True,
    ) -> None:
        self._updater = updater
        self._flats = list(flats)
        self._cores = cores
        self._of_buffer = {id(flat.buffer): flat for flat in flats}
        self._buffers = LockFreeBuffers([flat.buffer for flat in flats], spares, self._submit, room=room, learns=learns)

        self.updates = 0
        """Jobs finished since the start; written by the thread."""

        # `_handles` and `_when_idle` belong to the thread; it writes `_failure`, once.
        self._handles: dict[int, JobHandle] = {}
        self._when_idle: list[threading.Event] = []
        self._failure: BaseException | None = None
        self._messages: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    # Called by compute.

    def start(self) -> None:
        """Starts both threads; call once."""
        self._updater.run_in_thread(self._cores)
        thread = threading.Thread(target=self._work, name="lightning_ptm buffering", daemon=True)
        thread.start()
        self._thread = thread  # only once it has started: `stop` joins it

    def offer(self, flat: int, contribution: Contribution) -> None:
        """Hands over a reduced gradient of a step; it is applied exactly once, some time later."""
        self.check()
        self._messages.put(partial(self._offer, self._flats[flat].buffer, contribution))

    def learn(self, step: int) -> None:
        """Lets updates with gradients of this step and later steps learn weight predictions."""
        self._messages.put(partial(self._buffers.learn, step))

    def prioritize(self, flat: int, needed: int) -> None:
        """Serves this flat first: compute waits for a version of it that includes `needed` contributions."""
        self._messages.put(partial(self._prioritize, self._flats[flat].buffer, needed))

    def give_back(self, pages: PagedTensor) -> None:
        """Returns pages that a newer version has replaced and that compute reads no more."""
        self._messages.put(partial(self._buffers.give_back, pages))

    def collect(self, flat: int, received: int) -> Version | None:
        """Takes the newest version of a flat; None if it was collected before, or neither includes nor predicts all of the
        `received` contributions. Never blocks."""
        return self._flats[flat].buffer.slot.collect(received)

    def peek(self, flat: int, received: int) -> Version | None:
        """Returns what `collect` would return now, or soon. Never blocks."""
        return self._flats[flat].buffer.slot.peek(received)

    def published(self, flat: int) -> bool:
        """Whether a version of a flat can be collected. Never blocks."""
        return self._flats[flat].buffer.slot.published

    def offers(self, flat: int) -> int:
        """Calls of `offer` for a flat that the thread has processed. Never blocks."""
        return self._flats[flat].buffer.offers

    def waiting(self, flat: int) -> int:
        """Sums of gradients of a flat that wait for an update, among the messages processed so far; several where gradients
        cannot be added. Only `offer` makes it grow. Never blocks."""
        return len(self._flats[flat].buffer.waiting)

    def applied(self, flat: int) -> int:
        """Contributions that the newest version of a flat includes. Never blocks."""
        return self._flats[flat].buffer.slot.applied

    def wait(self, until: Callable[[], bool]) -> None:
        """Blocks until `until`, a condition on versions, is true.

        Raises:
            The error that ended one of the threads, e.g. PageIOError.
        """
        with self._news:
            while not until():
                self.check()
                self._news.wait(_LOOK_S)
        self.check()

    def drain(self, collect: Callable[[], None]) -> None:
        """Blocks until every contribution is applied and the master states are in their home tier. Raises as `wait` does.

        Args:
            collect: collects versions and gives old pages back; without it updates would run out of spare pages.
        """
        self.check()
        idle = threading.Event()
        self._messages.put(lambda: self._when_idle.append(idle))
        while not idle.is_set():
            collect()
            with self._news:
                # Versions published from now on notify; those published before are collected at the next turn.
                self._news.wait(_DRAIN_LOOK_S)
            self.check()
        collect()
        self._updater.drain()

    def counts(self) -> list[Count]:
        """Numbers of contributions of each flat, counted after everything that was offered before this call."""
        self.check()
        answer: queue.SimpleQueue[list[Count]] = queue.SimpleQueue()
        self._messages.put(lambda: answer.put([_count(flat.buffer) for flat in self._flats]))
        while True:
            try:
                return answer.get(timeout=_LOOK_S)
            except queue.Empty:
                self.check()

    def check(self) -> None:
        """Raises the error that ended one of the threads, if one has ended."""
        if self._failure is not None:
            raise self._failure
        self._updater.pump()
        if self._thread is None or not self._thread.is_alive():
            raise InternalError("the buffering thread has ended; nothing is updated any more")

    def stop(self) -> None:
        """Ends both threads; pending updates are not done. Idempotent, never raises."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._messages.put(None)
            thread.join()
        self._failure = None  # as in `Updater.close`: its traceback would keep the run's memory
        self._updater.stop()

    # Called in the thread.

    def _work(self) -> None:
        use_cores(self._cores)
        try:
            while (message := self._messages.get()) is not None:
                message()
                if self._buffers.idle and self._when_idle and not self._buffers.publish_exact():
                    waiting, self._when_idle = self._when_idle, []
                    for event in waiting:
                        event.set()
                    self._notify()
        except BaseException as error:  # I2
            self._failure = error
            self._notify()

    def _submit(self, begun: Begin[FlatBuffer], contribution: Contribution, target: PagedTensor) -> None:
        buffer = begun.flat
        flat = self._of_buffer[id(buffer)]
        steps, transform = combined(contribution)
        prediction = WeightPrediction(flat.states, steps[-1], begun.ahead, buffer.prediction) if begun.ahead else None
        job = UpdateJob(
            flat.states,
            flat.shadow,
            contribution.source,
            target,
            steps[-1] if steps else GroupValues(()),
            transform,
            steps[:-1],
            merge=begun.at_once,
            after=contribution.after,
            fresh_target=True,
            prediction=prediction,
            on_done=lambda: self._messages.put(partial(self._finish, buffer, prediction, bool(steps))),
        )
        handle = self._updater.submit(job)
        self._handles[id(buffer)] = handle
        if buffer.urgent:
            self._updater.promote(handle)

    def _prioritize(self, buffer: FlatBuffer, needed: int) -> None:
        if self._buffers.prioritize(buffer, needed) and buffer.urgent:
            self._updater.promote(self._handles[id(buffer)])

    def _offer(self, buffer: FlatBuffer, contribution: Contribution) -> None:
        self._buffers.offer(buffer, contribution)
        self._notify()  # compute may have waited for the weight prediction, or to learn which gradients wait

    def _finish(self, buffer: FlatBuffer, prediction: WeightPrediction | None, update: bool) -> None:
        del self._handles[id(buffer)]
        self._buffers.finish(buffer, prediction)
        self.updates += update
        self._notify()

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()


def _count(buffer: FlatBuffer) -> Count:
    return Count(buffer.name, buffer.received, buffer.applied, buffer.pending)
