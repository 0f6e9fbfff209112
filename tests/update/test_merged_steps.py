"""Several steps of Adam in one call: the moments of as many steps, and nearly their move; anything else one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from paged_training import Make, Twin, make_allocator, make_twin, plain_step, random_gradients, read, set_lr
from torch import optim

from lightning_ptm.terms import Tier
from lightning_ptm.update.merged_steps import YOUNG_STEPS, merge

ADAM: dict[str, Make] = {
    "adam": lambda groups: optim.Adam(groups, lr=1e-3),
    "fused": lambda groups: optim.Adam(groups, lr=1e-3, fused=True),
    "adamw": lambda groups: optim.AdamW(groups, lr=1e-3, weight_decay=0.1),
    "betas": lambda groups: optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.99), fused=True),
}
ONE_BY_ONE: dict[str, Make] = {
    "momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "amsgrad": lambda groups: optim.Adam(groups, lr=1e-3, amsgrad=True),
    "coupled decay": lambda groups: optim.Adam(groups, lr=1e-3, weight_decay=0.1),
    "maximize": lambda groups: optim.AdamW(groups, lr=1e-3, maximize=True),
    "rmsprop": lambda groups: optim.RMSprop(groups, lr=1e-3),
}


@pytest.fixture(params=[Tier.DEVICE, Tier.DISK])
def home(request: pytest.FixtureRequest) -> Tier:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[list[Twin]]:
    made: list[Twin] = []
    yield made
    for twin in made:
        twin.close()


def train(twin: Twin, steps: int) -> None:
    """Both sides, one by one."""
    for step in range(steps):
        gradients = random_gradients(step, torch.float32)
        twin.updater.finish(twin.submit(gradients))
        plain_step(twin, gradients)


def several(twin: Twin, count: int) -> None:
    """`count` steps with one gradient and growing rates: as one job, and one by one."""
    gradients = random_gradients(999, torch.float32)
    hypers = []
    for _ in range(count):
        set_lr(twin, 1.1)
        hypers.append(twin.hyper())
        plain_step(twin, gradients)
    job = twin.job(gradients, earlier=hypers[:-1], merge=True, fresh_target=True)
    twin.updater.finish(twin.updater.submit(job))
    twin.updater.drain()


@pytest.mark.slow_unless(
    "home0-adam-8",
    "home0-fused-8",
    "home0-adamw-3",
    "home0-betas-8",
    "home1-adam-3",
    "home1-fused-3",
    "home1-adamw-8",
    "home1-betas-3",
)
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("name", list(ADAM))
def test_moments_are_exact_and_the_move_is_near(twins, tmp_path: Path, home: Tier, name: str, count: int) -> None:
    allocator = make_allocator(tmp_path if home is Tier.DISK else None, device_mib=12)
    twin = make_twin(ADAM[name], allocator, home=home, compute=torch.float32)
    twins.append(twin)
    train(twin, 2 * YOUNG_STEPS)
    before = [parameter.detach().clone() for parameter in twin.plain]
    several(twin, count)
    assert twin.states.master is not None
    masters = twin.pieces(read(allocator, twin.states.master))
    assert all(
        torch.equal(one, two) for one, two in zip(masters, twin.pieces(read(allocator, twin.target)), strict=True)
    )
    slots = {slot: twin.pieces(read(allocator, paged)) for slot, paged in twin.states.slots.items()}
    for index, parameter in enumerate(twin.plain):
        state = twin.plain_optimizer.state[parameter]
        scalars = twin.states.scalars(twin.order.index(index))
        assert scalars is not None and float(scalars.values["step"]) == float(state["step"]) == 2 * YOUNG_STEPS + count
        for slot, values in slots.items():
            torch.testing.assert_close(values[index], state[slot], rtol=1e-4, atol=1e-6)
    moved = torch.cat([(master - old).reshape(-1) for master, old in zip(masters, before, strict=True)])
    wanted = torch.cat([(new.detach() - old).reshape(-1) for new, old in zip(twin.plain, before, strict=True)])
    assert float((moved - wanted).norm()) < 0.12 * float(wanted.norm())  # the second moment, of 20 steps, grows in each


@pytest.mark.parametrize("name", list(ONE_BY_ONE))
def test_others_take_their_steps_one_by_one(twins, name: str) -> None:
    twin = make_twin(ONE_BY_ONE[name], make_allocator(device_mib=12), compute=torch.float32)
    twins.append(twin)
    train(twin, 2 * YOUNG_STEPS)
    several(twin, 4)
    twin.assert_equal()


def test_young_moments_and_unequal_histories_are_taken_one_by_one(twins) -> None:
    young = make_twin(ADAM["adamw"], make_allocator(device_mib=12), compute=torch.float32)
    unequal = make_twin(ADAM["adamw"], make_allocator(device_mib=12), compute=torch.float32)
    twins += [young, unequal]
    train(young, YOUNG_STEPS - 1)
    for step in range(2 * YOUNG_STEPS):
        gradients = random_gradients(step, torch.float32, unused=(2,) if step < 3 else ())
        unequal.updater.finish(unequal.submit(gradients))
        plain_step(unequal, gradients)
    for twin in (young, unequal):
        several(twin, 4)
        twin.assert_equal()


def test_hyper_parameters_that_change_between_steps(twins) -> None:
    twin = make_twin(ADAM["adamw"], make_allocator(device_mib=12))
    twins.append(twin)
    group = dict(twin.hyper().groups[0])
    assert merge(twin.states.traits, [group, {**group, "lr": 0.5}], 50.0) is not None
    for changed in ({"betas": (0.5, 0.9)}, {"eps": 1e-3}, {"weight_decay": 0.5}):
        assert merge(twin.states.traits, [group, {**group, **changed}], 50.0) is None
    assert merge(twin.states.traits, [{**group, "lr": 0.0}] * 3, 50.0) is not None
