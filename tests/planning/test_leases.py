"""Leases: what keeps a unit where it is, and until when."""

from __future__ import annotations

from lightning_ptm.planning.leases import Leases


def test_each_call_gives_back_its_own_lease() -> None:
    leases = Leases(2)
    leases.take(1)
    leases.take(1)
    leases.give_back(1)
    assert leases.used(1) and leases.leased(1) and not leases.leased(0)
    leases.give_back(1)
    assert not leases.leased(1)


def test_a_backward_has_one_lease_however_often_it_is_given_back() -> None:
    leases = Leases(1)
    leases.take_backward(0)
    leases.take_backward(0)
    assert leases.in_backward(0) and leases.used(0)
    leases.give_back_backward(0)
    leases.give_back_backward(0)
    assert not leases.leased(0)
    leases.take(0)
    assert leases.used(0) and not leases.in_backward(0)


def test_who_holds_a_unit_does_not_use_it() -> None:
    leases = Leases(2)
    leases.hold(0)
    leases.hold(1)
    assert leases.held(0) and leases.leased(0) and not leases.used(0)
    leases.let_go(0)
    assert not leases.leased(0) and leases.held(1)
    leases.let_go_all()
    assert not leases.leased(1)


def test_an_iteration_that_failed_leaves_no_lease() -> None:
    leases = Leases(2)
    leases.take(0)
    leases.take_backward(1)
    leases.hold(1)
    leases.forget()
    assert not leases.leased(0) and not leases.leased(1)
    leases.take(0)
    leases.give_back(0)
    assert not leases.leased(0)
