"""Forecasts of updates: how near they come, what they leave alone, and that versions carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from paged_training import Make, Twin, make_allocator, make_twin, read
from test_lock_free_buffers import Bench, gradient, pages, put
from torch import optim

from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.version_policy import REACH, Begin
from lightning_ptm.terms import Tier
from lightning_ptm.update.gradient_source import ParameterGradients, Transform
from lightning_ptm.update.lock_free_buffers import Contribution, FlatBuffer, Version
from lightning_ptm.update.weight_prediction import WeightPrediction, can_predict_weights

SHAPES = ((3, 7), (64, 130), (1,), (129,), (300, 171), (64,), (33, 65), (8193,))

OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "sgd": (lambda groups: optim.SGD(groups, lr=0.1), 1e-5),
    "momentum": (lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9), 1e-5),
    "dampened": (lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5), 1e-5),
    "maximize": (lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, maximize=True), 1e-5),
    "adam": (lambda groups: optim.Adam(groups, lr=0.01), 1e-3),
    "adamw": (lambda groups: optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), fused=True, weight_decay=0.1), 0.1),
}


@pytest.fixture
def twin_of(tmp_path: Path) -> Iterator[Callable[..., Twin]]:
    made: list[Twin] = []

    def make(optimizer: Make, home: Tier = Tier.DEVICE, compute: torch.dtype = torch.float32) -> Twin:
        allocator = make_allocator(tmp_path if home is Tier.DISK else None, device_mib=12)
        made.append(make_twin(optimizer, allocator, home=home, compute=compute))
        return made[-1]

    yield make
    for twin in made:
        twin.close()


def signs(step: int, scale: float = 1.0, unused: tuple[int, ...] = ()) -> list[torch.Tensor | None]:
    """Gradients of +-scale: all elements of a block then have one second moment, as the forecast assumes."""
    generator = torch.Generator().manual_seed(step)
    found: list[torch.Tensor | None] = [
        torch.randint(0, 2, shape, generator=generator).float().mul_(2).sub_(1).mul_(scale) for shape in SHAPES
    ]
    for index in unused:
        found[index] = None
    return found


def learn(
    twin: Twin, steps: int, unused: tuple[int, ...] = (), last: WeightPrediction | None = None
) -> WeightPrediction:
    """Some updates; the last leaves what momentum makes of the parameters in the target."""
    forecast = last
    for step in range(steps):
        forecast = WeightPrediction(twin.states, twin.hyper(), 1, forecast)
        job = twin.job(signs(step, unused=unused), prediction=forecast, fresh_target=True)
        twin.updater.finish(twin.updater.submit(job))
    twin.updater.drain()
    assert forecast is not None
    return forecast


def source(twin: Twin, gradients: list[torch.Tensor | None]) -> ParameterGradients:
    return ParameterGradients([gradients[index] for index in twin.order])


def master(twin: Twin) -> torch.Tensor:
    assert twin.states.master is not None
    return torch.cat([piece.reshape(-1) for piece in twin.pieces(read(twin.allocator, twin.states.master))])


def copy(twin: Twin) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in twin.pieces(read(twin.allocator, twin.target))])


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.DISK])
@pytest.mark.parametrize("steps", [1, 2, 12])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_comes_near_what_the_next_update_does(twin_of, name, steps, home) -> None:
    make, tolerance = OPTIMIZERS[name]
    twin = twin_of(make, home)
    forecast = learn(twin, steps)
    now = master(twin)
    assert name == "sgd" or not torch.equal(copy(twin), now)
    coming = signs(100)
    # Clipped and with a loss scale, as they arrive.
    scaled = [None if each is None else each * 8.0 for each in coming]
    transform = Transform(unscale=torch.tensor(0.25), clip=torch.tensor(0.5))
    forecast.add_(twin.target.tensor(), source(twin, scaled), transform)
    foreseen = copy(twin)
    twin.updater.finish(twin.submit(coming))
    twin.updater.drain()
    after = master(twin)
    assert float((foreseen - after).norm() / (now - after).norm()) < tolerance


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_good_as_their_rounding(twin_of, compute) -> None:
    twin = twin_of(lambda groups: optim.Adam(groups, lr=0.05), compute=compute)
    forecast = learn(twin, 3)
    # A loss scale of 2**16 must not drown in float16's range.
    coming = signs(100)
    scaled = [None if each is None else (each * 2.0**10).to(compute) for each in coming]
    forecast.add_(twin.target.tensor(), source(twin, scaled), Transform(unscale=torch.tensor(2.0**-10)))
    twin.updater.finish(twin.submit(coming))
    twin.updater.drain()
    after = master(twin)
    error = (copy(twin).float() - after).abs()
    assert float((error / after.abs().clamp(min=0.05)).max()) < 2.5 * torch.finfo(compute).eps


def test_parameters_without_a_gradient_are_left_alone(twin_of) -> None:
    twin = twin_of(OPTIMIZERS["adam"][0])
    forecast = learn(twin, 3, unused=(1,))
    before = [piece.clone() for piece in twin.pieces(read(twin.allocator, twin.target))]
    forecast.add_(twin.target.tensor(), source(twin, signs(50, unused=(4,))), Transform())
    after = twin.pieces(read(twin.allocator, twin.target))
    # 1 was never updated, so nothing is known of it; 4 has no gradient now.
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [
        index in (1, 4) for index in range(len(SHAPES))
    ]


@pytest.mark.parametrize("second", [0.999, 0.9])
def test_a_gradient_far_larger_than_any_before_is_not_taken_at_its_word(twin_of, second) -> None:
    """Adam bounds its steps: a row that was hardly used must not be thrown far away by the first gradient that it gets."""
    for steps in (30, 80):  # of noise that counts, and, with 0.999, of noise that is taken over several blocks at once
        twin = twin_of(lambda groups: optim.Adam(groups, lr=0.01, betas=(0.9, second)))
        forecast = learn(twin, 1)
        for _ in range(steps):
            forecast = WeightPrediction(twin.states, twin.hyper(), 1, forecast)
            job = twin.job(signs(1, 1e-9), prediction=forecast, fresh_target=True)
            twin.updater.finish(twin.updater.submit(job))
        before = copy(twin).clone()
        forecast.add_(twin.target.tensor(), source(twin, signs(2, 1e6)), Transform())
        assert float((copy(twin) - before).abs().max()) < 0.1


def test_one_block_with_a_far_larger_gradient_goes_no_further_for_its_neighbours(twin_of) -> None:
    twin = twin_of(OPTIMIZERS["adam"][0])
    forecast = learn(twin, 80)
    for values in (1.0, 1e6):
        coming = signs(100)
        assert coming[1] is not None
        coming[1][0] *= values  # (64, 130): two blocks and a bit of a row
        before = copy(twin).clone()
        forecast.add_(twin.target.tensor(), source(twin, coming), Transform())
        assert float((copy(twin) - before).abs().max()) < 0.1


def test_curvature_is_taken_over_while_it_is_young_and_read_again_when_it_is_not(twin_of) -> None:
    """Slots hold 4 bytes an element: reading them all for each forecast is what this saves."""
    twin = twin_of(OPTIMIZERS["adam"][0])
    old = learn(twin, 32)
    young = learn(twin, 2, last=old)
    assert young._curvature is old._curvature and set(young._learned.values()) == {32}
    later = learn(twin, 1, last=young)
    assert later._curvature is not old._curvature and set(later._learned.values()) == {35}
    # What others read of the old one has not changed under them, and both foresee what comes.
    now = master(twin)
    coming = signs(100)
    foreseen = []
    for forecast in (young, later):
        base = twin.target.tensor().clone()
        forecast.add_(base, source(twin, coming), Transform())
        foreseen.append(base - twin.target.tensor())
    twin.updater.finish(twin.submit(coming))
    twin.updater.drain()
    moved = (master(twin) - now).norm()
    assert float((foreseen[0] - foreseen[1]).norm() / moved) < 0.02


def test_other_optimizers_are_not_forecast(twin_of) -> None:
    for make, known in (
        (lambda groups: optim.AdamW(groups), True),
        (lambda groups: optim.SGD(groups, lr=0.1), True),
        (lambda groups: optim.RMSprop(groups), False),
        (lambda groups: optim.Adagrad(groups), False),
    ):
        assert can_predict_weights(twin_of(make).states.traits) is known


def first_value(gradient: object) -> float:
    assert isinstance(gradient, ParameterGradients)
    value = gradient._flat[0]
    assert value is not None
    return float(value[0])


class Counts(WeightPrediction):
    """Stands for a weight prediction: notes the gradients that it was given, and what for."""

    def __init__(self) -> None:
        self.added: list[tuple[float, int]] = []
        """Value of the gradient, and of the pages that it was added to."""

    def add_(self, values: torch.Tensor, gradient: object, transform: Transform, steps: int = 1) -> None:
        self.added.append((first_value(gradient), int(values[0])))


class WithPlaces(Bench):
    def _start(self, begun: Begin[FlatBuffer], contribution: Contribution, target: PagedTensor) -> None:
        put(target, float(target.id))
        super()._start(begun, contribution, target)


def test_a_version_forecasts_what_was_received_and_is_not_in_it() -> None:
    bench = WithPlaces(spares=4)
    (flat,) = bench.flats
    forecast = Counts()
    bench.buffers.offer(flat, gradient(0, 1.0))
    bench.buffers.offer(flat, gradient(1, 2.0))  # waits
    (job,) = bench.jobs
    bench.jobs.remove(job)
    bench.buffers.finish(flat, forecast)
    assert forecast.added == [(2.0, job.target.id)]
    assert flat.slot.collect(3) is None and flat.slot.peek(3) is None
    bench.buffers.offer(flat, gradient(2, 4.0))  # the version is published, and nobody has seen it
    assert forecast.added[1:] == [(4.0, job.target.id)]
    version = flat.slot.collect(3)
    assert version is not None
    assert (version.pages, version.applied, version.seen, version.exact) == (job.target, 1, 3, False)


def test_without_a_forecast_any_version_fits() -> None:
    assert Version(pages(1), 1, 1).fits(5)
    lacking = Version(pages(1), 1, 1, Counts())
    assert lacking.fits(1) and not lacking.fits(1 + REACH)
    assert lacking.fits(2 + REACH)  # so far ahead nothing is forecast


def test_exact_parameters_are_published_when_asked_for() -> None:
    bench = WithPlaces(spares=4)
    (flat,) = bench.flats
    bench.buffers.offer(flat, gradient(0))
    bench.jobs.clear()
    bench.buffers.finish(flat, Counts())
    assert not flat.exact and bench.buffers.idle
    assert bench.buffers.publish_exact()
    (job,) = bench.jobs
    assert job.contribution.origins == () and flat.pending == 0
    bench.end(job)
    version = flat.slot.collect(1)
    assert version is not None and version.exact and (version.applied, version.seen) == (1, 1)
    assert not bench.buffers.publish_exact()
    # What was learned is still good for the gradients to come.
    assert isinstance(version.prediction, Counts)
