"""Whose gradients are in the pages of a flat, and whose were used up."""

from __future__ import annotations

from lightning_ptm.runtime.gradients.gradient_shard import GradientContent


def facts(it: GradientContent) -> tuple[bool, list[bool], tuple[bool, ...]]:
    return it.filled, list(it.present), tuple(it.spent)


def full() -> GradientContent:
    """Of three parameters, the first two."""
    it = GradientContent(3)
    it.add_present([True, False, False])
    it.add_present([False, True, False])
    it.mark_filled()
    return it


def test_what_comes_is_beside_what_is_there() -> None:
    it = GradientContent(3)
    assert facts(it) == (False, [False] * 3, ())
    it.add_present([True, False, False])
    assert facts(it) == (False, [True, False, False], ())  # on its way
    assert facts(full()) == (True, [True, True, False], ())


def test_pages_are_empty_when_the_last_gradient_is_forgotten() -> None:
    it = full()
    it.forget_slot(0)
    assert facts(it) == (True, [False, True, False], ())
    it.forget_slot(1)
    assert facts(it) == (False, [False] * 3, ())


def test_what_is_used_up_is_known_until_all_is_forgotten() -> None:
    it = full()
    it.spend()
    assert facts(it) == (False, [False] * 3, (True, True, False))
    it.forget()
    assert facts(it) == (False, [False] * 3, ())


def test_gradients_in_no_pages_are_used_up_where_there_are_any() -> None:
    it = GradientContent(2)
    it.spend_uncollected([False, True])
    it.spend_uncollected([False, False])  # asked again, when they are gone
    assert facts(it) == (False, [False] * 2, (False, True))
