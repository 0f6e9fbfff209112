"""Schedulers of updates over real pages: which flat is updated when, with which hyper-parameters. Updates are in this
thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decided_by_hand import PAGE, LaidOut, Net, decided, laid_out
from torch.optim import SGD, Adam, Optimizer

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.updates.updates import SynchronousUpdates
from lightning_ptm.update.gradient_source import Transform
from lightning_ptm.update.update_job import UpdateJob
from lightning_ptm.update.updater import Updater

EARLY: dict[str, Any] = {"offload_optimizer": "disk", "disk_path": "/d"}
"""Units are updated as their backward ends."""
PLAIN = Transform()


class Run:
    """Three units of one parameter each, with weights of 1."""

    def __init__(self, made: LaidOut, optimizers: list[Optimizer], room: int, *, in_thread: bool) -> None:
        self.made = made
        self.parameters: list[Any] = [made.flats[unit][0].store.binding.parameters[0] for unit in range(3)]
        self.updater = Updater(made.allocator, staging=made.blueprint.staging_chunks, staging_tier=made.blueprint.ram)
        self.updates = SynchronousUpdates(made.stores, made.flats, optimizers, self.updater, room, in_thread=in_thread)
        self.optimizers = optimizers

    def backward(self, *units: int, value: float = 1.0) -> None:
        """Runs the backward of these units, in the order in which gradients come."""
        for unit in sorted(units, reverse=True):
            parameter = self.parameters[unit]
            parameter.grad = torch.full(parameter.shape, value)
            (flat,) = self.made.flats[unit]
            flat.gradient.collect()
            self.updates.unit_ready(unit)

    def step(self, optimizer: int = 0, transform: Transform = PLAIN) -> None:
        self.updates.step(optimizer, transform)
        self.updates.finish_all()
        for flats in self.made.flats:
            for flat in flats:
                flat.gradient.clear()

    def weights(self) -> list[float]:
        """Returns the weights of the units; all elements of a unit are equal."""
        found = []
        for store in self.made.stores:
            (values,) = {float(each) for each in self.made.values.precise(store.flats[0]).unique()}
            found.append(round(values, 4))
        return found


def of_all(kind: type[Optimizer] = SGD, **options: Any) -> Callable[[Net], list[Optimizer]]:
    return lambda module: [kind(list(module.parameters()), **{"lr": 0.1, **options})]  # type: ignore[call-arg]


def of_all_with_sgd(module: Net) -> list[Optimizer]:
    return of_all()(module)


@contextmanager
def run(
    disk: Path,
    make: Callable[[Net], list[Optimizer]] = of_all_with_sgd,
    *,
    room: int = 1 << 30,
    in_thread: bool = False,
    **options: Any,
) -> Iterator[Run]:
    module = Net(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    optimizers = make(module)
    with laid_out(decided(module, optimizers, **options), [disk]) as made:
        made.take_over()
        it = Run(made, optimizers, room, in_thread=in_thread)
        for row in made.blueprint.inventory.rows:
            if row.what.value == "staging buffers":
                it.updater.take_staging(row.tier, getattr(torch, row.dtype), row.count)
        try:
            yield it
        finally:
            it.updates.close()
            it.updater.close()


def test_a_step_updates_what_has_a_gradient(disk: Path) -> None:
    with run(disk) as it:
        it.backward(0, 2)
        assert it.weights() == [1, 1, 1] and not it.updates.in_mid_step
        it.step()
        assert it.weights() == [0.9, 1, 0.9] and it.updates.steps_taken == 1
        it.step()  # without gradients
        assert it.weights() == [0.9, 1, 0.9] and it.updates.steps_taken == 2


def test_an_armed_unit_is_updated_when_it_is_ready_and_once(disk: Path) -> None:
    with run(disk, of_all(Adam), **EARLY) as it:
        assert not it.updates.armed
        it.updates.arm(it.optimizers[0])
        it.backward(1, 2)
        it.updates.finish_all()
        assert it.updates.armed and it.updates.in_mid_step and it.weights() == [1, 0.9, 0.9]
        it.backward(0)
        it.step()
        assert it.weights() == [0.9, 0.9, 0.9] and not it.updates.in_mid_step and not it.updates.armed  # I1
        it.backward(0, 1, 2)
        assert not it.updates.in_mid_step
        it.step()
        assert it.weights() == [0.8, 0.8, 0.8]


@pytest.mark.parametrize("options", [{}, {**EARLY, "keep_gradients": True}], ids=["in RAM", "kept"])
def test_where_gradients_outlive_the_backward_nothing_is_armed(options: dict[str, Any], disk: Path) -> None:
    with run(disk, of_all(Adam), **options) as it:
        it.updates.arm(it.optimizers[0])
        assert not it.updates.armed
        it.backward(0, 1, 2)
        assert it.weights() == [1, 1, 1]
        it.step()
        assert it.weights() == [0.9, 0.9, 0.9]


def test_hyper_parameters_are_those_of_the_step(disk: Path) -> None:
    with run(disk) as it:
        it.backward(0, 1, 2)
        it.optimizers[0].param_groups[0]["lr"] = 0.5  # a scheduler's, before the step
        it.step()
        it.optimizers[0].param_groups[0]["lr"] = 0.25
        assert it.weights() == [0.5, 0.5, 0.5]  # I2


def test_what_changes_between_an_early_update_and_the_step_is_refused(disk: Path) -> None:
    with run(disk, of_all(Adam), **EARLY) as it:
        it.updates.arm(it.optimizers[0])
        it.backward(2)
        it.optimizers[0].param_groups[0]["lr"] = 0.5
        with pytest.raises(
            UsageError, match=r"lr in the optimizer's param_groups changed between the backward pass and"
        ):
            it.step()
        it.updates.abandon()
        assert not it.updates.armed and not it.updates.in_mid_step


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_parameter_is_updated_with_the_group_that_it_is_in(in_backward: bool, disk: Path) -> None:
    def two_groups(module: Net) -> list[Optimizer]:
        first, *others = module.parameters()
        return [SGD([{"params": [first]}, {"params": others, "lr": 0.5}], lr=0.1)]

    with run(disk, two_groups, **(EARLY if in_backward else {})) as it:
        first, second = it.optimizers[0].param_groups
        assert not it.updates.groups.outgrown(0)
        first["params"].append(second["params"].pop())
        if in_backward:
            it.updates.arm(it.optimizers[0])
        it.backward(0, 1, 2)
        it.step()
        assert it.weights() == [0.9, 0.5, 0.9] and not it.updates.groups.outgrown(0)  # I3
        first["params"].append(torch.nn.Parameter(torch.zeros(3)))
        assert it.updates.groups.outgrown(0)
        with pytest.raises(
            UsageError, match=r"shape \(3,\) was put into a group of SGD during a batch.* between two batches"
        ):
            it.step()
        first["params"].pop()
        assert not it.updates.groups.outgrown(0)
        it.optimizers[0].add_param_group({"params": []})
        assert it.updates.groups.outgrown(0)


def test_each_optimizer_steps_alone(disk: Path) -> None:
    def two(module: Net) -> list[Optimizer]:
        first, *others = module.parameters()
        return [SGD([first], lr=0.1), SGD(others, lr=0.5)]

    with run(disk, two) as it:
        assert it.updates.groups.index_of(it.optimizers[1]) == 1
        assert [unit for unit, _ in it.updates.groups.flats_of(1)] == [2, 1]
        assert [id(each) for each in it.updates.groups.parameters_of(0)] == [id(it.parameters[0])]
        it.backward(0, 1, 2)
        it.updates.step(1, PLAIN)
        it.updates.finish_all()
        assert it.weights() == [1, 0.5, 0.5]
        with pytest.raises(ConfigError, match="SGD was not returned by configure_optimizers"):
            it.updates.groups.index_of(SGD([torch.zeros(1)]))


def test_a_step_that_is_not_taken(disk: Path) -> None:
    with run(disk, of_all(Adam), **EARLY) as it:
        it.updates.arm(it.optimizers[0])
        it.backward(2)
        it.updates.skip(0)
        assert not it.updates.armed and not it.updates.in_mid_step and it.updates.steps_taken == 0


def test_what_is_done_to_gradients_on_their_way(disk: Path) -> None:
    """Not to those that are clipped where they are."""
    halves = Transform(clip=torch.tensor(0.5))
    for options, expected in (
        ({}, 0.9),
        ({"device_memory": "4MiB", "offload_parameters": "host", "offload_optimizer": "host"}, 0.95),
    ):
        with run(disk, keep_gradients=True, **options) as it:
            it.backward(0, 1, 2)
            for of_unit in it.made.flats:
                for flat in of_unit:
                    assert flat.gradient.route.clips_in_place == (expected == 0.9)
                    if not flat.gradient.route.clips_in_place:
                        flat.gradient.view.clip_later()
            it.step(0, halves)
            assert it.weights() == [expected] * 3


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that nobody waits for do not go on."""
    monkeypatch.setattr(Updater, "pump", lambda updater: None)


def test_a_unit_is_read_when_its_update_is_done(disk: Path, idle: None) -> None:
    with run(disk, of_all(Adam), **EARLY) as it:
        it.updates.arm(it.optimizers[0])
        it.backward(2)
        assert it.updates.pending(2) and not it.updates.pending(1)
        (pending,) = it.updates._pending[2]
        it.updates.finish(2)  # I5
        assert pending.handle.done() and not it.updates.pending(2)


def test_a_job_whose_wait_is_interrupted_stays_pending(disk: Path, idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(disk, of_all(Adam), **EARLY) as it:
        it.updates.arm(it.optimizers[0])
        it.backward(2)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(it.updater, "finish", interrupt)
            it.updates.finish(2)
        assert it.updates.pending(2)
        it.updates.finish(2)
        assert not it.updates.pending(2) and it.weights() == [1, 1, 0.9]


def interrupt(handle: Any) -> None:
    raise KeyboardInterrupt


def test_gradients_that_wait_are_bounded(disk: Path, idle: None) -> None:
    for room, waiting in ((1 << 30, {1, 2}), (0, {1})):
        with run(disk, of_all(Adam), room=room, **EARLY) as it:
            it.updates.arm(it.optimizers[0])
            it.backward(1, 2)
            assert set(it.updates._pending) == waiting  # I6: those of one unit
            it.updates.finish_all()


IN_RAM: dict[str, Any] = {"device_memory": 64 * PAGE, "offload_parameters": "device", "offload_optimizer": "host"}


@pytest.mark.parametrize(("in_thread", "waiting"), [(True, {1, 2}), (False, {1})])
def test_beside_a_device_gradients_with_pages_of_their_own_in_ram_do_not_count(
    disk: Path, idle: None, in_thread: bool, waiting: set[int]
) -> None:
    with run(disk, of_all(Adam), room=0, in_thread=in_thread, **IN_RAM) as it:
        it.updates.arm(it.optimizers[0])
        it.backward(1, 2)
        assert set(it.updates._pending) == waiting  # I6
        it.updates.finish_all()
        assert it.weights() == [1, 0.9, 0.9]


@pytest.mark.parametrize(("options", "first"), [({}, True), (EARLY, False)])
def test_beside_a_device_its_updates_come_first(
    disk: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], first: bool
) -> None:
    with run(disk, of_all(Adam), in_thread=True, **options) as it:
        jobs: list[UpdateJob] = []
        submit = it.updater.submit
        monkeypatch.setattr(it.updater, "submit", lambda job, **how: jobs.append(job) or submit(job, **how))
        it.backward(1, 2)
        it.step()
        assert [job.turn < 0 for job in jobs] == [first, first]
