"""Counters of a flat that compute keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from by_hand_buffering import Flat, contribution, counters

from lightning_ptm.update.lock_free_buffers import Version


def test_gradients_of_other_parameters_are_a_change() -> None:
    (counter,) = counters(Flat())
    found = []
    for which in ((True, True), (True, True), (True, False), (True, False), (True, True)):
        counter.hand_over(contribution(0, which))
        found.append((counter.received, counter.changed))
    assert found == [(1, 0), (2, 0), (3, 3), (4, 3), (5, 5)]
    counter.skipped = 2
    assert counter.produced == 7


def test_what_the_next_version_must_include_is_by_the_bound_or_by_what_was_asked() -> None:
    (counter,) = counters(Flat())
    counter.received = 7
    assert counter.must_include(3) == 4
    counter.needed = 6
    assert counter.must_include(3) == 6


def test_a_version_is_read_from_now_on() -> None:
    (counter,) = counters(Flat())
    counter.received, counter.exact = 3, False
    pages: Any = None
    counter.take(Version(pages, applied=2, seen=2))
    assert (counter.adopted, counter.seen, counter.learned, counter.exact, counter.prediction) == (
        2,
        2,
        False,
        True,
        None,
    )
    assert counter.may_read(1) and not counter.may_read(0)


def test_a_forecast_waits_for_the_gradient_and_for_who_reads_the_parameters() -> None:
    flat: Any = Flat()
    counter: Any = counters(flat)[0]
    gradient: Any = contribution(3)
    told: list[str] = []
    gradient.after = (SimpleNamespace(wait=lambda: told.append("gradient")),)
    counter.prediction = SimpleNamespace(add_=lambda *_: told.append("added"))
    flat.store.await_reads = lambda: told.append("reads")
    changes = {
        "values_will_change": lambda: told.append("will change"),
        "values_have_changed": lambda: told.append("have changed"),
    }
    flat.store.binding = SimpleNamespace(**changes)
    flat.store.home = SimpleNamespace(tensor=lambda: torch.zeros(4))
    counter.add_prediction(gradient)
    assert told == ["gradient", "reads", "will change", "added", "have changed"] and (counter.seen, counter.exact) == (
        1,
        False,
    )
