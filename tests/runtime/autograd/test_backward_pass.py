"""A backward pass from its beginning to its end, as the executor and the listener hear of it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from other_stream import OtherStream
from test_hooks import Heard, Queued

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.streams import ComputeStream
from lightning_ptm.runtime.autograd.backward_pass import BackwardPass
from lightning_ptm.runtime.autograd.calls import Action, Calls

BEGINS = ["backward begins", "backward 0"]
ENDS = ["end 0", "gradients of 0", "backward ends", "all gradients"]


class Driven:
    """A pass over a root and a unit, of a parameter each."""

    def __init__(self) -> None:
        self.heard: Any = Heard()
        self.calls = Calls(2, lambda unit: 1, lambda call: True)
        self.it = BackwardPass(["", "block"], self.heard, self.heard, self.calls, ComputeStream(CpuBackend()))


def test_an_announced_pass_ends_when_it_is_said_to() -> None:
    driven = Driven()
    it, heard = driven.it, driven.heard
    with it.of_the_loss(nullcontext()):
        assert heard.heard() == BEGINS and it.begun and it.announced
        it.start()  # is in progress
        it.act(1, driven.calls.output(1))
        assert heard.heard() == ["backward 1"]
    assert heard.heard() == ["end 1", "gradients of 1", *ENDS] and not it.begun and not it.announced


def test_one_of_the_users_own_ends_when_autograd_is_through() -> None:
    driven = Driven()
    it, heard = driven.it, driven.heard
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: it.start())
    (x * 2).sum().backward()
    assert heard.heard() == [BEGINS[0], "unannounced", BEGINS[1], *ENDS] and not it.begun


def test_whatever_stream_is_the_callers_a_pass_begins_and_ends_on_the_runs() -> None:
    stream = OtherStream()
    heard: Any = Queued(stream)
    it = BackwardPass(["", "block"], heard, heard, Calls(2, lambda unit: 1, lambda call: True), stream)
    with it.of_the_loss(nullcontext()):
        assert heard.heard() == BEGINS and heard.aside == []
    assert heard.heard() == ENDS and heard.aside == []


def test_a_pass_that_fails_is_given_up_and_nobody_hears_of_gradients() -> None:
    driven = Driven()
    it, heard = driven.it, driven.heard
    with pytest.raises(ValueError, match="in the pass"), it.of_the_loss(nullcontext()):
        heard.heard()
        raise ValueError("in the pass")
    assert heard.heard() == ["leave backward 0", "leave backward 1", "backward ends"]
    assert not it.begun and not it.announced
    with it.of_the_loss(nullcontext()):  # another may follow
        assert heard.heard() == BEGINS


def test_a_forgotten_pass_tells_nobody() -> None:
    driven = Driven()
    driven.it.announced = True
    driven.it.start()
    driven.heard.heard()
    driven.it.forget()
    assert not driven.it.begun and not driven.it.announced and driven.heard.heard() == []


def test_actions_are_done_in_their_order() -> None:
    driven = Driven()
    driven.it.act(1, (Action.HOLD, Action.ENTER, Action.LEAVE, Action.END))
    assert driven.heard.heard() == ["hold 1", "backward 1", "leave backward 1", "end 1", "gradients of 1"]
    with pytest.raises(UsageError, match="for unit block after its backward had ended"):
        driven.it.act(1, (Action.REFUSE,))
