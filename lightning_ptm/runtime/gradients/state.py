"""The state table of one flat's gradient: events in, the next state out. Imports no torch.

Owns what is recorded of the gradient: its state, and for which parameters of the flat there is one. flat_gradient.py
sends the events, store.py that a reduction has ended.

What autograd or the user has put into `.grad` since is no state: both change it without telling anybody, so it is
looked at when it matters (grad_attribute.py). While a state is EMPTY, `.grad` is all there is.

I1: an event that is illegal in a state raises and changes nothing.
I2: a gradient is handed to one update of a step, and one that a step has used is not handed again, unless it stays for
    the user (STEPPED).
I3: `present` names no parameter exactly in EMPTY. In HANDED and USED it names those that the update got.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from lightning_ptm.errors import InternalError


class State(enum.Enum):
    """Where the gradient is that was collected from `.grad`, or handed to an update from there."""

    __hash__ = object.__hash__  # Enum's own is a call of Python's

    EMPTY = "nothing is recorded; pages have undefined contents"
    REDUCING = "a reduction is in flight, and pages have undefined contents"
    IN_PAGES = "pages hold the sum of the passes so far"
    ADDING = "pages hold a sum, and a reduction that is added to it is in flight"
    HANDED = "an update of the step in progress has got it"
    USED = "a step has used it; its values are not available, and it must be forgotten before more is added"
    STEPPED = "a step has used it, and it stays, readable and added to, until the user forgets it"


class Event(enum.Enum):
    """What happens to the gradient."""

    __hash__ = object.__hash__

    PASS_BEGINS = "a backward pass begins"
    ADD = "gradients were added to the pages, or written there"
    REDUCE = "a reduction of gradients to the pages was started"
    REDUCED = "the result of the reduction was added to the pages, or written there"
    HAND = "an update got it"
    USE = "the step is over, and has changed it or given it away"
    KEEP = "the step is over, and it stays as it is"
    GIVE_UP = "the step in progress is given up or left out"
    FORGET = "the user has zeroed or removed it"


_NEXT: dict[tuple[State, Event], State] = {
    (State.EMPTY, Event.PASS_BEGINS): State.EMPTY,
    (State.EMPTY, Event.ADD): State.IN_PAGES,
    (State.EMPTY, Event.REDUCE): State.REDUCING,
    (State.EMPTY, Event.HAND): State.HANDED,  # from `.grad`
    (State.EMPTY, Event.FORGET): State.EMPTY,
    (State.REDUCING, Event.PASS_BEGINS): State.REDUCING,
    (State.REDUCING, Event.REDUCED): State.IN_PAGES,
    (State.IN_PAGES, Event.PASS_BEGINS): State.IN_PAGES,
    (State.IN_PAGES, Event.ADD): State.IN_PAGES,
    (State.IN_PAGES, Event.REDUCE): State.ADDING,
    (State.IN_PAGES, Event.HAND): State.HANDED,
    (State.IN_PAGES, Event.FORGET): State.EMPTY,
    (State.ADDING, Event.PASS_BEGINS): State.ADDING,
    (State.ADDING, Event.REDUCED): State.IN_PAGES,
    (State.HANDED, Event.PASS_BEGINS): State.HANDED,
    (State.HANDED, Event.USE): State.USED,
    (State.HANDED, Event.KEEP): State.STEPPED,
    (State.HANDED, Event.GIVE_UP): State.EMPTY,  # the update has applied it: it must not be applied again
    (State.HANDED, Event.FORGET): State.HANDED,  # the step that it was handed to is still to come
    (State.USED, Event.PASS_BEGINS): State.EMPTY,
    (State.USED, Event.FORGET): State.EMPTY,
    (State.STEPPED, Event.PASS_BEGINS): State.STEPPED,
    (State.STEPPED, Event.ADD): State.IN_PAGES,
    (State.STEPPED, Event.REDUCE): State.ADDING,
    (State.STEPPED, Event.HAND): State.HANDED,
    (State.STEPPED, Event.FORGET): State.EMPTY,
}
"""Legal transitions. A reduction in flight is waited for before anything but the beginning of a pass."""

IN_FLIGHT = frozenset((State.REDUCING, State.ADDING))
"""States in which a reduction is in flight."""

SUMS = frozenset((State.IN_PAGES, State.ADDING, State.STEPPED))
"""States in which pages hold a gradient that the next one is added to."""

COLLECTED = SUMS | IN_FLIGHT
"""States in which pages hold a gradient that a step may use, or will hold it."""


class GradientState:
    """State of the gradient of one flat.

    Args:
        name: of the flat, for errors.
        count: number of the flat's parameters.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._none = (False,) * count
        # state
        self.now = State.EMPTY
        """The present state. Written by `send` alone."""
        self.present: Sequence[bool] = self._none
        """For each parameter, whether it has a gradient (I3). Written here alone."""

    def send(self, event: Event, slots: Sequence[bool] | None = None) -> None:
        """Handles an event.

        Args:
            slots: the parameters whose gradients are added or handed; None: those that have one already.

        Raises:
            InternalError: the event is illegal in this state; nothing has changed.
        """
        following = _NEXT.get((self.now, event))
        if following is None:
            raise InternalError(
                f"the gradient of {self._name} is in state {self.now.name} ({self.now.value}), in which the event "
                f"{event.name} ({event.value}) is illegal; nothing was changed; please report this"
            )
        self.now = following
        if following is State.EMPTY:
            self.present = self._none
        elif slots is not None:
            added = event is not Event.HAND
            self.present = tuple((old and added) or new for old, new in zip(self.present, slots, strict=True))

    def forget_one(self, slot: int) -> None:
        """Forgets the gradient of one parameter: with the last one, all."""
        left = tuple(here and each != slot for each, here in enumerate(self.present))
        if not any(left):
            self.send(Event.FORGET)
        elif self.now in SUMS - IN_FLIGHT:
            self.present = left
        else:
            raise InternalError(
                f"one gradient of {self._name} is forgotten in state {self.now.name} ({self.now.value}), in which others "
                "of it are needed; nothing was changed; please report this"
            )
