"""The engine, driven by hand: iterations, backward passes and steps of a small model, set-ups that fail, the end, and what
other ranks do meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_by_hand import PAGE, drawn
from small_parts import Twin
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_ptm.comm import Communicators, SoloCommunicator
from lightning_ptm.comm.agreement import Row
from lightning_ptm.errors import CapacityError, InternalError, RankError, UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.inventory import Lifetime, What
from lightning_ptm.planning.inventory import Row as InventoryRow
from lightning_ptm.runtime import engine as module_under_test
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.runtime.engine import Engine
from lightning_ptm.runtime.executor import Mode
from lightning_ptm.terms import Tier

WIDTH = 8
HOMES: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "masters on disk": {"master_home": "disk", "disk_path": "/d"},
    "all on disk": {"master_home": "disk", "parameter_home": "disk", "disk_path": "/d"},
    "lock-free": {"master_home": "disk", "disk_path": "/d", "lock_free": True, "max_staleness": 0},
}


class Block(nn.Module):
    """One page."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((PAGE // 4,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:WIDTH]


class Chain(nn.Module):
    """Two blocks, and a page of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.full((PAGE // 4,), 0.5))
        self.blocks = nn.ModuleList([Block(2.0), Block(3.0)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.head[:WIDTH]).sum()


def weights(module: Chain) -> list[float]:
    """The first element of each parameter."""
    return [float(parameter.detach()[0]) for parameter in module.parameters()]


def of_all(module: nn.Module) -> list[Optimizer]:
    return [Adam(list(module.parameters()), lr=0.1)]


class Run:
    """An engine of a module and its one optimizer."""

    def __init__(self, module: Chain, optimizers: Sequence[Optimizer], engine: Engine) -> None:
        self.module = module
        self.engine = engine
        self.optimizers = optimizers

    def forward(self) -> Tensor:
        with self.engine.iteration(Mode.TRAIN):
            loss: Tensor = self.module(torch.arange(1.0, WIDTH + 1))
        return loss

    def backward(self) -> None:
        loss = self.forward()
        with self.engine.backward():
            loss.backward()

    def step(self) -> None:
        self.engine.step(self.optimizers[0])
        self.engine.zero_grad(self.optimizers[0], forget=True)

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.arm(self.optimizers[0])
            self.backward()
            self.step()

    def weights(self) -> list[float]:
        with self.engine.gathered([self.module], write=False):
            return weights(self.module)

    @property
    def live(self) -> list[int]:
        return [store.unit.index for store in self.engine.stores if store.live]


def build(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    disk: Path | None = None,
    *,
    communicator: Any = None,
    change: Callable[[Any], Any] = lambda blueprint: blueprint,
    **settings: Any,
) -> Engine:
    communicator = communicator or SoloCommunicator()
    settings = {"units": ["Block"], **settings}
    blueprint = drawn(module, list(optimizers), ranks=communicator.world_size, **settings)
    communicators = Communicators(blueprint.holders.mesh, communicator)
    paths = [disk] if disk is not None and blueprint.pool_bytes[Tier.DISK] else []
    return Engine(module, change(blueprint), optimizers, communicators, CpuBackend(), disk_paths=paths, poison=True)


@contextmanager
def run(
    disk: Path | None = None,
    make: Callable[[Chain], list[Optimizer]] = of_all,
    module: Chain | None = None,
    **asked: Any,
) -> Iterator[Run]:
    module = module or Chain()
    optimizers = make(module)
    engine = build(module, optimizers, disk, **asked)
    try:
        yield Run(module, optimizers, engine)
    finally:
        engine.close()


def plainly(count: int) -> list[float]:
    module = Chain()
    (optimizer,) = of_all(module)
    for _ in range(count):
        module(torch.arange(1.0, WIDTH + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def hooks_on(module: nn.Module) -> list[Any]:
    """What somebody has hung on modules and parameters."""
    found: list[Any] = []
    for each in module.modules():
        found += [*each._forward_hooks, *each._forward_pre_hooks, *each._backward_hooks, *each._state_dict_hooks]
        found += [name for name in ("forward", "state_dict") if name in vars(each)]
    for parameter in module.parameters():
        found += [*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())]
    return found


# -- iterations and steps ---------------------------------------------------------------------------------------------


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
            assert it.engine.executor.held(0)
        assert not it.engine.executor.held(0)
        assert it.engine.iterations == 1
        it.train()
        assert it.weights() == plainly(1)


def test_units_are_updated_behind_the_backward_where_the_step_is_armed(disk: Path) -> None:
    for armed in (False, True):
        with run(disk, **HOMES["masters on disk"]) as it:
            if armed:
                it.engine.arm(it.optimizers[0])
            it.backward()
            assert it.engine.in_mid_step is armed
            it.step()
            assert not it.engine.in_mid_step and it.weights() == plainly(1)


def test_a_pass_of_the_users_own_updates_nothing(disk: Path) -> None:
    with run(disk, **HOMES["masters on disk"]) as it:
        it.engine.arm(it.optimizers[0])
        it.forward().backward()  # hooks hear of it; the strategy has not begun it
        assert not it.engine.in_mid_step


def test_an_iteration_that_fails_is_given_up_and_the_next_one_is_whole(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        it.engine.arm(it.optimizers[0])
        with pytest.raises(RuntimeError, match="must match the size"), it.engine.iteration(Mode.TRAIN):
            it.module.blocks[0](torch.ones(WIDTH + 1))
        assert not any(it.engine.executor.used(unit) for unit in range(3)) and not it.engine.updates.armed
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
            assert not isinstance(weight, ClosedParameter)
            it.step()
            assert isinstance(weight, ClosedParameter) and not isinstance(it.module.head, ClosedParameter)
        assert it.weights() == plainly(1)


def test_gradients_of_two_passes_add_up_and_are_forgotten(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"], keep_gradients=True) as it:
        it.backward()
        once = float(it.engine.gradient_norm(it.optimizers[0]))
        it.backward()
        assert float(it.engine.gradient_norm(it.optimizers[0])) == 2 * once
        it.engine.zero_grad(it.optimizers[0], forget=True)
        assert float(it.engine.gradient_norm(it.optimizers[0])) == 0


def test_gradients_of_a_unit_that_was_not_called_are_refused(disk: Path) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        it.forward()
        it.engine.executor.end()
        it.engine.executor.begin(Mode.TRAIN, trace=False)
        with pytest.raises(UsageError, match=r"weights of blocks\.0 \(Block\) were used without a call of that module"):
            it.engine.unit_backward_ended(1)


def test_a_frozen_parameter_that_is_unfrozen_in_mid_run_is_refused(disk: Path) -> None:
    module = Chain()
    module.blocks[1].weight.requires_grad_(False)

    def of_the_first(module: Chain) -> list[Optimizer]:
        return [SGD([module.head, module.blocks[0].weight], lr=0.1)]

    with run(disk, of_the_first, module, **HOMES["masters on disk"]) as it:
        it.train()
        module.blocks[1].weight.requires_grad_()
        with pytest.raises(UsageError, match=r"blocks\.1\.weight was frozen when its pages were laid out and requires"):
            it.forward()


class Looks(nn.Module):
    """A page of an embedding, as a unit, behind a root without parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(PAGE // 4 // WIDTH, WIDTH, **options)

    def forward(self) -> Tensor:
        found: Tensor = self.table(torch.arange(5))
        return found.sum()


def looks_twice(disk: Path, home: str, **options: Any) -> None:
    module = Looks(**options)
    optimizer = SGD(list(module.parameters()), lr=0.1)
    engine = build(module, [optimizer], disk, **{"units": ["Embedding"], **HOMES[home]})
    try:
        for _ in range(2):
            with engine.iteration(Mode.TRAIN):
                loss = module()
            with engine.backward():
                loss.backward()
            engine.step(optimizer)
            engine.zero_grad(optimizer, forget=True)
    finally:
        engine.close()


def test_a_forward_that_writes_to_its_weight_is_refused_with_what_to_do_instead(disk: Path) -> None:
    looks_twice(disk, "in RAM", max_norm=0.1)
    with pytest.raises(
        UsageError, match=r"table\.weight was written to.* with max_norm\), leave that out and clip the weight"
    ):
        looks_twice(disk, "all on disk", max_norm=0.1)


@pytest.mark.parametrize("home", ["in RAM", "all on disk"])
def test_a_sparse_gradient_is_refused_at_the_first_step_by_its_parameters_name(disk: Path, home: str) -> None:
    with pytest.raises(
        UsageError, match=r"the gradient of table\.weight is sparse .* use sparse=False in its embedding"
    ):
        looks_twice(disk, home, sparse=True)


# -- weights by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", HOMES)
def test_edits_of_gathered_weights_are_trained_on(disk: Path, home: str) -> None:
    with run(disk, **HOMES[home]) as it:
        with it.engine.gathered([it.module.blocks[0]]):
            it.module.blocks[0].weight.data.fill_(7.0)
        assert it.weights() == [0.5, 7.0, 3.0]
        it.train()
        assert it.weights()[1] != 7.0


def test_what_ram_cannot_hold_whole_is_not_gathered(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        monkeypatch.setattr(module_under_test, "free_host_bytes", lambda: 0)
        refused = pytest.raises(CapacityError, match=r"the weights of Chain take .* of RAM where they are whole")
        with refused, it.engine.gathered([it.module]):
            pass


# -- set-up and end ---------------------------------------------------------------------------------------------------

BUILT = (
    "Updater",
    "Values",
    "SynchronousUpdates",
    "Clipping",
    "Reduction",
    "Planner",
    "Executor",
    "Hooks",
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
            with pytest.raises(UsageError, match="this run has ended and its pages are gone"):
                late()


def test_parts_are_given_up_whatever_becomes_of_others(disk: Path) -> None:
    with run(disk, **HOMES["masters on disk"]) as it:
        it.engine._undo.callback(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.engine.close()
        assert hooks_on(it.module) == []


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_pages_are_taken_for_the_rows_of_the_inventory_alone(disk: Path, tier: Tier) -> None:
    def with_a_row_more(blueprint: Any) -> Any:
        row = InventoryRow(What.SAVES, tier, 100, "float32", 4, lifetime=Lifetime.RUN)
        inventory = dataclasses.replace(blueprint.inventory, rows=(*blueprint.inventory.rows, row))
        return dataclasses.replace(blueprint, inventory=inventory)

    module = Chain()
    with pytest.raises(InternalError, match=rf"set-up has taken \d+ bytes of the {tier.name.lower()} tier"):
        build(module, of_all(module), disk, change=with_a_row_more, **HOMES["masters on disk"])
    assert weights(module) == [0.5, 2.0, 3.0] and hooks_on(module) == []


# -- two ranks --------------------------------------------------------------------------------------------------------


class Other(Twin):
    """The other rank does as this one does."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def exchange(self, row: Row) -> list[Row]:
        return [row, row]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def fail(self, reason: str) -> None:
        self.failures.append(reason)


def test_a_unit_is_updated_one_behind_its_reduction_and_the_last_at_the_end() -> None:
    other = Other()
    with run(communicator=other) as it:
        loss = it.forward()
        reduced_before: dict[int, list[str]] = {}
        ready = it.engine._update_ready
        it.engine._update_ready = lambda unit: (reduced_before.__setitem__(unit, list(other.issued)), ready(unit))  # type: ignore[method-assign,assignment]
        other.issued.clear()
        with it.engine.backward():
            loss.backward()
        assert list(reduced_before) == [2, 1, 0]
        counts = [sum(each.startswith("reduce") for each in issued) for issued in reduced_before.values()]
        assert counts == [2, 3, 3]


def test_a_failed_run_tells_the_others_once_and_issues_nothing_more() -> None:
    other = Other()
    with run(communicator=other) as it:
        it.engine.fail(ValueError("x" * 1000))
        (told,) = other.failures
        assert told.startswith("ValueError: xxx") and len(told) == 500 and it.engine.rendezvous.failed
        with pytest.raises(RankError, match="this run has failed, so other ranks may never come to a collective"):
            it.engine.rendezvous.gather_for(None)  # type: ignore[arg-type]
