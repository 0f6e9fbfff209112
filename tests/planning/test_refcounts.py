"""Leases: what keeps a unit where it is, and until when."""

from __future__ import annotations

from lightning_ptm.planning.refcounts import UnitRefcounts


def test_each_call_gives_back_its_own_lease() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.take(1)
    refcounts.take(1)
    refcounts.give_back(1)
    assert refcounts.used(1) and refcounts.referenced(1) and not refcounts.referenced(0)
    refcounts.give_back(1)
    assert not refcounts.referenced(1)


def test_a_backward_has_one_lease_however_often_it_is_given_back() -> None:
    refcounts = UnitRefcounts(1)
    refcounts.take_backward(0)
    refcounts.take_backward(0)
    assert refcounts.in_backward(0) and refcounts.used(0)
    refcounts.give_back_backward(0)
    refcounts.give_back_backward(0)
    assert not refcounts.referenced(0)
    refcounts.take(0)
    assert refcounts.used(0) and not refcounts.in_backward(0)


def test_who_holds_a_unit_does_not_use_it() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.hold(0)
    refcounts.hold(1)
    assert refcounts.held(0) and refcounts.referenced(0) and not refcounts.used(0)
    refcounts.unhold(0)
    assert not refcounts.referenced(0) and refcounts.held(1)
    refcounts.unhold_all()
    assert not refcounts.referenced(1)


def test_an_iteration_that_failed_leaves_no_lease() -> None:
    refcounts = UnitRefcounts(2)
    refcounts.take(0)
    refcounts.take_backward(1)
    refcounts.hold(1)
    refcounts.forget()
    assert not refcounts.referenced(0) and not refcounts.referenced(1)
    refcounts.take(0)
    refcounts.give_back(0)
    assert not refcounts.referenced(0)
