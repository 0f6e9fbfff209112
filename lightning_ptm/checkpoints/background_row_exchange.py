"""Row exchanges (row_exchange.py) of a checkpoint that is saved in the background of training.

Updates make each rank copy pages in an order of its own (snapshot.py), while all ranks must exchange pages in the same
order. So the part of a page that is to be exchanged is copied and queued, and a thread exchanges page after page. Owns
the queued pages. A page's place in the common order is its turn.

I1: only this thread exchanges, through a channel of its own, so training never waits in an exchange.
I2: the page whose turn it is is always admitted, however much is queued, and waiting for room never blocks the thread
    that copies that page. So a rank's next page depends on no other rank, and all turns come.
I3: pages that are queued, being exchanged or received take at most `room_bytes`, or the size of two turns if that is
    more.
I4: the thread ends in `finish` or `give_up`, or when it fails; afterwards `wait_for_room` returns at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from lightning_ptm.checkpoints.row_exchange import Message, RowExchange, Write
from lightning_ptm.errors import CheckpointError
from lightning_ptm.runtime.full_params.sharded_states import ShardedFlat
from lightning_ptm.update.core_limits import use_cores


class BackgroundRowExchange:
    """The exchanges of one save.

    Args:
        exchange: the exchanges, in order; only this object uses it from now on.
        room_bytes: see I3.
        failed: called with the error if the exchanges end before the last one.
    """

    def __init__(self, exchange: RowExchange, room_bytes: int, failed: Callable[[BaseException], None]) -> None:
        self._exchange = exchange
        self._room_bytes = room_bytes
        self._failed = failed
        self._turns = {(id(each.flat), each.start): number for number, each in enumerate(exchange.turns)}

        # State, under the condition's lock.
        self._changed = threading.Condition()
        self._turn = 0
        """The turn that is exchanged next."""
        self._waiting: dict[int, Message] = {}
        self._held: dict[int, int] = {}
        """Bytes of pages, by turn, from their admission until they are written."""
        self._ends = False
        """Whether no more pages are admitted."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._exchange_all, name="lightning_ptm rows", daemon=True)
        self._thread.start()

    def wait_for_room(self, flat: ShardedFlat, start: int) -> None:
        """Waits until a page may be passed to `begin`; returns at once if the page has no whole rows. For any thread
        that holds no lock."""
        turn = self._turns.get((id(flat), start))
        if turn is None:
            return
        needed = self._exchange.turns[turn].held_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or turn <= self._turn or sum(self._held.values()) + needed <= self._room_bytes
            )
            self._held[turn] = needed

    def begin(self, flat: ShardedFlat, start: int, page: Tensor, write: Write, *, stays: bool) -> None:
        """Queues a page to be exchanged in its turn; see `RowExchange.begin`. Errors of the exchange are not raised
        here."""
        turn = self._turns.get((id(flat), start))
        if turn is not None and not self._ends:
            message = self._exchange.message(flat, start, page, write, stays=stays)
            assert message is not None  # every page with a turn has rows to exchange
            with self._changed:
                self._waiting[turn] = message
                self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything is exchanged and written.

        Raises:
            CheckpointError: the error with which the exchanges ended early.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Ends the exchanges; see `RowExchange.give_up`. Waits for the exchange that reports the failure to the
        others."""
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Ends the exchanges without waiting: `wait_for_room` returns, and the thread reports the failure to the
        others."""
        with self._changed:
            self._ends = True
            self._waiting.clear()
            self._changed.notify_all()

    def _exchange_all(self) -> None:
        use_cores(1)
        try:
            for turn in range(len(self._turns)):
                message = self._next(turn)
                if message is None:
                    self._error = CheckpointError(
                        "the exchange of rows for a checkpoint was stopped before its last page, since saving failed, so the "
                        "checkpoint was not completed; earlier ones are untouched"
                    )
                    self._exchange.give_up()
                    return
                self._exchange.send(message)
                self._written(turn - 1)
            self._exchange.finish()
        except BaseException as error:
            self._error = error
            self.abandon()
            self._failed(error)
            self._exchange.give_up()

    def _next(self, turn: int) -> Message | None:
        """Returns the message of a turn when it is queued; None if saving has failed on this rank."""
        with self._changed:
            self._turn = turn
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ends or turn in self._waiting)
            return None if self._ends else self._waiting.pop(turn)

    def _written(self, turn: int) -> None:
        with self._changed:
            self._held.pop(turn, None)
            self._changed.notify_all()
