"""The engine, driven by hand: iterations of a small model, set-ups that fail, the end, and a run that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_by_hand import (
    HOMES,
    WIDTH,
    Chain,
    Other,
    build,
    hooks_on,
    of_all,
    plainly,
    run,
    weights,
)
from other_stream import OtherStream
from torch import nn

from lightning_ptm.comm import NeededCollective
from lightning_ptm.comm.agreement import Decision
from lightning_ptm.errors import RankError, UsageError
from lightning_ptm.runtime.engine import engine as module_under_test
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.terms import Mode, Operation


@pytest.mark.parametrize("home", HOMES)
def test_steps_are_those_of_a_plain_loop(disk: Path, home: str) -> None:
    with run(disk, **HOMES[home]) as it:
        it.train(3)
        assert it.weights() == plainly(3)
        assert it.engine.iterations == 3 and it.engine.updates.steps_taken == 3


@pytest.mark.parametrize("home", ["masters on disk", "all on disk"])
def test_nothing_is_gathered_between_iterations_that_an_update_will_change(disk: Path, home: str) -> None:
    with run(disk, **HOMES[home]) as it:
        it.train()
        for flats in it.engine.flats:
            for flat in flats:
                assert flat.store.resident or not flat.store.binding.bound  # I1
        it.train()
        assert it.weights() == plainly(2)


def test_an_evaluation_ends_with_its_block(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        with it.engine.iteration(Mode.FORWARD), torch.no_grad():
            assert it.module(torch.ones(WIDTH)) == 8 * 2 * 3 * 0.5
            assert it.engine.executor.refcounts.held(0)
        assert not it.engine.executor.refcounts.held(0)
        assert it.engine.iterations == 1
        it.train()
        assert it.weights() == plainly(1)


def test_an_iteration_that_fails_is_given_up_and_the_next_one_is_whole(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        it.engine.stepping.arm(it.optimizers[0])
        with pytest.raises(RuntimeError, match="must match the size"), it.engine.iteration(Mode.TRAIN):
            it.module.blocks[0](torch.ones(WIDTH + 1))
        assert not any(it.engine.executor.refcounts.used(unit) for unit in range(3)) and not it.engine.updates.armed
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        it.train()
        assert it.weights() == plainly(1)


def test_what_a_step_inside_of_its_iteration_may_still_be_changing_cannot_be_read(disk: Path) -> None:
    with run(disk, **HOMES["lock-free"]) as it:
        weight = it.module.blocks[0].weight
        with it.engine.iteration(Mode.TRAIN, manual=True):
            loss = it.module(torch.arange(1.0, WIDTH + 1))
            with it.engine.backward():
                loss.backward()
            assert not isinstance(weight, GuardedParameter)
            it.step()
            assert isinstance(weight, GuardedParameter) and not isinstance(it.module.head, GuardedParameter)
        assert it.weights() == plainly(1)


# -- weights by hand --------------------------------------------------------------------------------------------------


BUILT = (
    "Updater",
    "ParameterValues",
    "GatheredParameters",
    "update_scheduler",
    "Clipping",
    "Reduction",
    "Planner",
    "Executor",
    "BackwardActions",
    "Hooks",
    "StepGradients",
    "SummonFullParams",
    "StateDicts",
)
"""Parts in the order in which they are made."""


@pytest.mark.parametrize("fails", BUILT)
def test_a_set_up_that_fails_leaves_nothing_behind(disk: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and files are looked for by a fixture (tests/conftest.py)."""

    def failing(*_: Any, **__: Any) -> Any:
        raise MemoryError(fails)

    module = Chain()
    monkeypatch.setattr(module_under_test, fails, failing)
    with pytest.raises(MemoryError, match=fails):
        build(module, of_all(module), disk, **HOMES["all on disk"])
    assert weights(module) == [0.5, 2.0, 3.0] and hooks_on(module) == []  # I2
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


@pytest.mark.parametrize("home", HOMES)
def test_the_end_leaves_no_hook_and_refuses_what_comes_after(disk: Path, home: str) -> None:
    with run(disk, **HOMES[home]) as it:
        it.train()
        assert hooks_on(it.module)
        it.engine.close()
        it.engine.close()  # once
        assert hooks_on(it.module) == []
        for late in (it.forward, it.step):
            with pytest.raises(UsageError, match="this run has ended and its pages are freed"):
                late()


def test_parts_are_given_up_whatever_becomes_of_others(disk: Path) -> None:
    with run(disk, **HOMES["masters on disk"]) as it:
        it.engine._undo.callback(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.engine.close()
        assert hooks_on(it.module) == []


def test_a_failed_run_tells_the_others_once_and_issues_nothing_more() -> None:
    other = Other()
    with run(communicator=other) as it:
        it.engine.fail(ValueError("x" * 1000))
        (told,) = other.failures
        assert told.startswith("ValueError: xxx") and len(told) == 500 and it.engine.barriers.failed
        with pytest.raises(RankError, match="this run has failed, so other ranks may never come to a collective"):
            it.engine.barriers.gather_for(None)  # type: ignore[arg-type]


def test_whatever_stream_is_the_callers_it_takes_part_in_what_others_ask_for_on_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with run() as it:
        stream = OtherStream()
        for owner in (it.engine.executor, it.engine.reduction):
            monkeypatch.setattr(owner, "take_part", lambda asked: None)
            stream.watch(monkeypatch, owner, "take_part")
        monkeypatch.setattr(it.engine, "stream", stream)
        for operation in (Operation.GATHER, Operation.REDUCE):
            it.engine._take_part(Decision(NeededCollective(operation, 0), unanimous=False, flags=0))
        assert stream.noted == 2 * [("take_part", True)]
