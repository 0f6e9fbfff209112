"""Consequences of a backward pass, of an engine that is driven by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_by_hand import (
    HOMES,
    Other,
    plainly,
    run,
)

from lightning_ptm.errors import UsageError
from lightning_ptm.terms import Mode


def test_units_are_updated_behind_the_backward_where_the_step_is_armed(disk: Path) -> None:
    for armed in (False, True):
        with run(disk, **HOMES["masters on disk"]) as it:
            if armed:
                it.engine.stepping.arm(it.optimizers[0])
            it.backward()
            assert it.engine.stepping.in_mid_step is armed
            it.step()
            assert not it.engine.stepping.in_mid_step and it.weights() == plainly(1)


def test_a_pass_of_the_users_own_updates_nothing(disk: Path) -> None:
    with run(disk, **HOMES["masters on disk"]) as it:
        it.engine.stepping.arm(it.optimizers[0])
        it.forward().backward()  # hooks hear of it; the strategy has not begun it
        assert not it.engine.stepping.in_mid_step


def test_a_pass_of_the_loss_that_fails_has_ended(disk: Path) -> None:
    with run(disk, **HOMES["masters on disk"]) as it:
        it.engine.stepping.arm(it.optimizers[0])
        loss = it.forward()
        with pytest.raises(ArithmeticError), it.engine.backward():
            raise ArithmeticError  # the caller catches it and runs a pass of its own
        loss.backward()
        assert not it.engine.stepping.in_mid_step


def test_gradients_of_a_unit_that_was_not_called_are_refused(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        it.engine.executor.begin(Mode.TRAIN, trace=False)
        with pytest.raises(UsageError, match=r"weights of blocks\.0 \(Block\) were used without a call of that module"):
            it.engine.backwards.unit_backward_ended(1)


def test_a_unit_is_updated_one_behind_its_reduction_and_the_last_at_the_end() -> None:
    other = Other()
    with run(communicator=other) as it:
        loss = it.forward()
        reduced_before: dict[int, list[str]] = {}
        ready = it.engine.backwards._update_ready
        it.engine.backwards._update_ready = lambda unit: (
            reduced_before.__setitem__(unit, list(other.issued)),
            ready(unit),
        )  # type: ignore[method-assign,assignment]
        other.issued.clear()
        with it.engine.backward():
            loss.backward()
        assert list(reduced_before) == [2, 1, 0]
        counts = [sum(each.startswith("reduce") for each in issued) for issued in reduced_before.values()]
        assert counts == [2, 3, 3]
