"""The state table of one flat's gradient: events in, the next state out. Imports no torch.

Owns what is recorded of the gradient: its state, and for which parameters of the flat there is one. docs/design/
gradients.md says who sends which event.

What autograd or the user has put into `.grad` is no state: both change it without notice, so view.py looks at it when
it matters. While the state is EMPTY, a gradient is only in `.grad` or in the sums of view.py (`GradView.postpone`).

I1: an event that is illegal in a state raises and changes nothing.
I2: a gradient is handed to one update of a step, and one that a step has used is not handed again, unless it stays for
    the user (STEPPED).
I3: `present` names no parameter exactly in EMPTY. In HANDED and USED it names those that the update got.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from lightning_ptm.errors import InternalError


class GradientState(enum.Enum):
    """Places of a gradient that was collected from `.grad`, or handed to an update from there."""

    __hash__ = object.__hash__  # Enum's own is a call of Python's

    EMPTY = "nothing is recorded; pages have undefined contents"
    REDUCING = "a reduction is in flight, and pages have undefined contents"
    IN_PAGES = "pages hold the sum of the passes so far"
    ADDING = "pages hold a sum, and a reduction that is added to it is in flight"
    HANDED = "an update of the step in progress has got it"
    USED = "a step has used it; its values are not available, and it must be forgotten before more is added"
    STEPPED = "a step has used it, and it stays, readable and added to, until the user forgets it"


class GradEvent(enum.Enum):
    """Events in the life of a gradient."""

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


_NEXT: dict[tuple[GradientState, GradEvent], GradientState] = {
    (GradientState.EMPTY, GradEvent.PASS_BEGINS): GradientState.EMPTY,
    (GradientState.EMPTY, GradEvent.ADD): GradientState.IN_PAGES,
    (GradientState.EMPTY, GradEvent.REDUCE): GradientState.REDUCING,
    (GradientState.EMPTY, GradEvent.HAND): GradientState.HANDED,  # from `.grad`
    (GradientState.EMPTY, GradEvent.FORGET): GradientState.EMPTY,
    (GradientState.REDUCING, GradEvent.PASS_BEGINS): GradientState.REDUCING,
    (GradientState.REDUCING, GradEvent.REDUCED): GradientState.IN_PAGES,
    (GradientState.IN_PAGES, GradEvent.PASS_BEGINS): GradientState.IN_PAGES,
    (GradientState.IN_PAGES, GradEvent.ADD): GradientState.IN_PAGES,
    (GradientState.IN_PAGES, GradEvent.REDUCE): GradientState.ADDING,
    (GradientState.IN_PAGES, GradEvent.HAND): GradientState.HANDED,
    (GradientState.IN_PAGES, GradEvent.FORGET): GradientState.EMPTY,
    (GradientState.ADDING, GradEvent.PASS_BEGINS): GradientState.ADDING,
    (GradientState.ADDING, GradEvent.REDUCED): GradientState.IN_PAGES,
    (GradientState.HANDED, GradEvent.PASS_BEGINS): GradientState.HANDED,
    (GradientState.HANDED, GradEvent.USE): GradientState.USED,
    (GradientState.HANDED, GradEvent.KEEP): GradientState.STEPPED,
    (
        GradientState.HANDED,
        GradEvent.GIVE_UP,
    ): GradientState.EMPTY,  # the update has applied it: it must not be applied again
    (
        GradientState.HANDED,
        GradEvent.FORGET,
    ): GradientState.HANDED,  # the step that it was handed to is still to come
    (GradientState.USED, GradEvent.PASS_BEGINS): GradientState.EMPTY,
    (GradientState.USED, GradEvent.FORGET): GradientState.EMPTY,
    (GradientState.STEPPED, GradEvent.PASS_BEGINS): GradientState.STEPPED,
    (GradientState.STEPPED, GradEvent.ADD): GradientState.IN_PAGES,
    (GradientState.STEPPED, GradEvent.REDUCE): GradientState.ADDING,
    (GradientState.STEPPED, GradEvent.HAND): GradientState.HANDED,
    (GradientState.STEPPED, GradEvent.FORGET): GradientState.EMPTY,
}
"""Legal transitions. A reduction in flight is waited for before anything but the beginning of a pass."""

IN_FLIGHT = frozenset((GradientState.REDUCING, GradientState.ADDING))
"""States in which a reduction is in flight."""

SUMS = frozenset((GradientState.IN_PAGES, GradientState.ADDING, GradientState.STEPPED))
"""States in which pages hold a gradient that the next one is added to."""

COLLECTED = SUMS | IN_FLIGHT
"""States in which pages hold a gradient that a step may use, or will hold it."""


class GradientRecord:
    """State of the gradient of one flat, and the parameters that have one.

    Args:
        name: of the flat, for errors.
        count: number of the flat's parameters.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._none = (False,) * count
        # state
        self.state = GradientState.EMPTY
        """The present state. Written by `send` alone."""
        self.present: Sequence[bool] = self._none
        """Whether each parameter has a gradient (I3). Only this class writes it."""

    def send(self, event: GradEvent, slots: Sequence[bool] | None = None) -> None:
        """Handles an event.

        Args:
            slots: the parameters whose gradients are added or handed; None: those that have one already.

        Raises:
            InternalError: the event is illegal in this state; nothing has changed.
        """
        following = _NEXT.get((self.state, event))
        if following is None:
            raise InternalError(
                f"the gradient of {self._name} is in state {self.state.name} ({self.state.value}), in which the event "
                f"{event.name} ({event.value}) is illegal; nothing was changed"
            )
        self.state = following
        if following is GradientState.EMPTY:
            self.present = self._none
        elif slots is not None:
            if event is not GradEvent.HAND and self.present is not self._none:
                slots = [old or new for old, new in zip(self.present, slots, strict=True)]
            self.present = tuple(slots)

    def forget_one(self, slot: int) -> None:
        """Forgets the gradient of one parameter: with the last one, all."""
        left = tuple(here and each != slot for each, here in enumerate(self.present))
        if not any(left):
            self.send(GradEvent.FORGET)
        elif self.state in SUMS - IN_FLIGHT:
            self.present = left
        else:
            raise InternalError(
                f"one gradient of {self._name} is forgotten in state {self.state.name} ({self.state.value}), in which others "
                "of it are needed; nothing was changed"
            )
