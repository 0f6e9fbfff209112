"""Exchanges of rows behind training: ranks take pages at other moments, and exchange them in one order.

An update takes what it is about to change, whichever page that is and whenever it comes on its rank. So what a page has of
whole rows is copied when it is taken, and waits for its turn; a thread exchanges page after page. Owns the pages that wait.

I1: this thread alone exchanges, by a channel that nothing else uses: whoever waits in an exchange is no part of training.
I2: the page whose turn it is is always taken, whatever waits, and nobody who waits for room holds up whoever takes it. So a
    rank's next page depends on no other rank, and all turns come.
I3: what waits, is on its way and has come is of `room_bytes`, or else of the two turns that cannot do without.
I4: the thread ends in `finish` or `give_up`, and where it fails; then nobody waits for room.
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
        exchange: what is exchanged, and how; used by this alone from now on.
        room_bytes: see I3.
        failed: is told why the exchanges have ended before the last one.
    """

    def __init__(self, exchange: RowExchange, room_bytes: int, failed: Callable[[BaseException], None]) -> None:
        self._exchange = exchange
        self._room_bytes = room_bytes
        self._failed = failed
        self._turns = {(id(each.flat), each.start): number for number, each in enumerate(exchange.turns)}

        # State, under the condition's lock.
        self._changed = threading.Condition()
        self._turn = 0
        """Whose page is exchanged next."""
        self._waiting: dict[int, Message] = {}
        self._held: dict[int, int] = {}
        """Bytes of pages, by turn, from when there is room for them until they are written."""
        self._ends = False
        """Nothing is taken any more."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on pages are exchanged."""
        self._thread = threading.Thread(target=self._exchange_all, name="lightning_ptm rows", daemon=True)
        self._thread.start()

    def wait_for_room(self, flat: ShardedFlat, start: int) -> None:
        """Until a page may be given to `begin`; at once if it has no whole rows. By any thread that holds no lock."""
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
        """See `RowExchange.begin`; the page is exchanged when its turn comes. Raises nothing of that."""
        turn = self._turns.get((id(flat), start))
        if turn is not None and not self._ends:
            message = self._exchange.message(flat, start, page, write, stays=stays)
            assert message is not None  # it has a turn
            with self._changed:
                self._waiting[turn] = message
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything is exchanged and written.

        Raises:
            CheckpointError: what the exchanges have ended with before the last one.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """See `RowExchange.give_up`. Waits for the exchange in which the others are told."""
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Some page will not come: nobody waits for room any more, and the others are told. Waits for nobody."""
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
                        "the exchange of rows for a checkpoint was given up before its last one"
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
        """The message whose turn it is; None if this rank has failed."""
        with self._changed:
            self._turn = turn
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ends or turn in self._waiting)
            return None if self._ends else self._waiting.pop(turn)

    def _written(self, turn: int) -> None:
        with self._changed:
            self._held.pop(turn, None)
            self._changed.notify_all()
