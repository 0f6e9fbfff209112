"""Norms and clips of gradients in `.grad` and in pages: torch's bits, what waits for the step, and what ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from decided_by_hand import PAGE, LaidOut, Net, decided, laid_out
from small_parts import Twin
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.runtime.updates.clipping import Clipping
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.updates import SynchronousUpdates
from lightning_ptm.terms import Tier
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.updater import Updater

PLACES: dict[str, dict[str, Any]] = {
    "in .grad": {},
    "in pages": {
        "device_memory": "4MiB",
        "offload_parameters": "host",
        "offload_optimizer": "host",
        "keep_gradients": True,
    },
    "on disk": {
        "device_memory": "4MiB",
        "disk_path": "/d",
        "offload_parameters": "disk",
        "offload_optimizer": "disk",
        "keep_gradients": True,
    },
}
IN_PAGES = ["in pages", "on disk"]
SCALE = 2.0**6


class Run:
    """Three units of a parameter each, of one, one and two pages, with gradients of the given values."""

    def __init__(self, made: LaidOut, optimizers: Sequence[Optimizer], communicator: Any) -> None:
        self.made = made
        self.parameters = [flat.store.binding.parameters[0] for flat in self.flats]
        self.updater = Updater(made.allocator, staging=made.blueprint.staging_chunks, staging_tier=made.blueprint.ram)
        self.updates = SynchronousUpdates(made.stores, made.flats, optimizers, self.updater, 1 << 30, in_thread=False)
        self.clipping = Clipping(communicator, self.updates, optimizers)

    @property
    def flats(self) -> list[FlatUpdate]:
        return [flat for of_unit in self.made.flats for flat in of_unit]

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        for flat, parameter, gradient in zip(self.flats, self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone().view(parameter.shape)
            flat.gradient.collect()
            flat.gradient.shard.settle()

    def gradients(self) -> list[Tensor]:
        """Returns the present gradients, 1-D."""
        found = []
        for flat, parameter in zip(self.flats, self.parameters, strict=True):
            whole = parameter.grad if flat.gradient.in_place else flat.gradient.shard.on_device()[: parameter.numel()]
            assert whole is not None
            found.append(whole.flatten().clone())
            flat.gradient.shard.settle()
        return found

    def updated_with(self, optimizer: int = 0) -> list[Tensor]:
        """Returns the gradients that this step gives the optimizer, with their transforms."""
        transform, found = self.clipping.take(optimizer), self.gradients()
        for gradient in found:
            transform.apply_(gradient)
        return found


def of_all(module: Net) -> list[Optimizer]:
    return [SGD(list(module.parameters()), lr=0.1)]


@contextmanager
def run(
    disk: Path,
    place: str = "in .grad",
    make: Callable[[Net], list[Optimizer]] = of_all,
    communicator: Any = None,
    **options: Any,
) -> Iterator[Run]:
    module = Net(2)
    optimizers = make(module)
    with laid_out(decided(module, optimizers, **PLACES[place], **options), [disk]) as made:
        made.take_over()
        it = Run(made, optimizers, communicator or SoloCommunicator())
        for row in made.blueprint.inventory.rows:
            if row.what.value == "staging buffers":
                it.updater.take_staging(row.tier, getattr(torch, row.dtype), row.count)
        tier = {"in .grad": Tier.DEVICE, "in pages": Tier.HOST, "on disk": Tier.DISK}[place]
        for flat in it.flats:
            assert flat.gradient.in_place == (place == "in .grad") and flat.gradient.route.tier is tier
        try:
            yield it
        finally:
            it.updates.close()
            it.updater.close()


def random_gradients(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(PAGE // 4 * pages, generator=generator) for pages in (1, 1, 2)]


def plain(gradients: Sequence[Tensor]) -> list[nn.Parameter]:
    """Parameters of a plain loop with these gradients."""
    found = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(found, gradients, strict=True):
        parameter.grad = gradient.clone()
    return found


def of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("place", PLACES)
def test_the_norm_is_torchs_to_the_last_bit(disk: Path, place: str, norm_type: float) -> None:
    gradients = random_gradients()
    with run(disk, place) as it:
        it.backward(gradients)
        free = it.made.allocator.free_bytes(Tier.DEVICE)
        norm = it.clipping.norm(0, norm_type, None)
        assert torch.equal(norm, nn.utils.get_total_norm(gradients, norm_type))
        assert it.made.allocator.free_bytes(Tier.DEVICE) == free
        assert same(it.gradients(), gradients)


def test_norms_are_combined_in_the_order_of_the_optimizers_groups(disk: Path) -> None:
    """A sum of three numbers in another order may be another number: of such gradients this is."""

    def turned(module: Net) -> list[Optimizer]:
        head, first, second = module.parameters()
        return [SGD([{"params": [second]}, {"params": [first, head]}], lr=0.1)]

    gradients = [torch.zeros_like(each) for each in random_gradients()]
    for gradient, value in zip(gradients, (1.0, 1.0, 2.0**24), strict=True):
        gradient[0] = value
    forward, backward = (nn.utils.get_total_norm(order, 1.0) for order in (gradients, gradients[::-1]))
    assert not torch.equal(forward, backward)
    with run(disk, make=turned) as it:
        it.backward(gradients)
        assert torch.equal(it.clipping.norm(0, 1.0, None), backward)


@pytest.mark.parametrize("place", PLACES)
def test_what_has_no_gradient_or_no_group_is_not_in_the_norm(disk: Path, place: str) -> None:
    gradients = random_gradients()
    with run(disk, place) as it:
        assert it.clipping.norm(0, 2.0, None) == 0
        it.backward([gradients[0], None, gradients[2]])
        assert torch.equal(it.clipping.norm(0, 2.0, None), nn.utils.get_total_norm([gradients[0], gradients[2]]))
        it.updates.groups.optimizers[0].param_groups[0]["params"].pop()
        assert torch.equal(it.clipping.norm(0, 2.0, None), nn.utils.get_total_norm(gradients[:1]))


@pytest.mark.parametrize("place", IN_PAGES)
def test_several_ranks_add_their_powers_and_take_the_greatest(disk: Path, place: str) -> None:
    gradients = random_gradients()
    power = sum(gradient.double().square().sum() for gradient in gradients)
    greatest = max(gradient.abs().max() for gradient in gradients)
    twin = Twin()
    with run(disk, place, communicator=twin) as it:
        it.backward(gradients)
        free = it.made.allocator.free_bytes(Tier.DEVICE)
        twin.their_values = torch.tensor(7.0, dtype=torch.float64)
        torch.testing.assert_close(it.clipping.norm(0, 2.0, None), (power + 7).sqrt().float())
        twin.their_values = torch.tensor(100.0, dtype=torch.float64)
        assert it.clipping.norm(0, float("inf"), None) == 100
        twin.their_values = torch.tensor(0.0, dtype=torch.float64)
        assert it.clipping.norm(0, float("inf"), None) == greatest
        assert twin.issued == ["sum", "maximum", "maximum"]
        assert it.made.allocator.free_bytes(Tier.DEVICE) == free
        # A rank that has none takes part, too.
        for flat in it.flats:
            flat.gradient.clear()
        twin.their_values = torch.tensor(9.0, dtype=torch.float64)
        assert it.clipping.norm(0, 2.0, None) == 3


# -- clips ------------------------------------------------------------------------------------------------------------


def clip_plainly(how: str, parameters: Sequence[nn.Parameter]) -> None:
    if how == "norm":
        nn.utils.clip_grad_norm_(parameters, 10.0)
    else:
        nn.utils.clip_grad_value_(parameters, 0.5)


def clip(it: Run, how: str, scale: LossScale | None = None) -> None:
    if how == "norm":
        it.clipping.by_norm(0, 10.0, scale)
    else:
        it.clipping.by_value(0, 0.5, scale)


@pytest.mark.parametrize("clips", [["norm"], ["value"], ["value", "norm"], ["norm", "value"]], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_each_clip_is_of_what_those_before_have_left(disk: Path, place: str, clips: list[str]) -> None:
    gradients = random_gradients()
    parameters = plain(gradients)
    with run(disk, place) as it:
        it.backward(gradients)
        for how in clips:
            clip(it, how)
            clip_plainly(how, parameters)
            norm = nn.utils.get_total_norm(of(parameters))
            torch.testing.assert_close(it.clipping.norm(0, 2.0, None), norm, rtol=0, atol=0)
        # Those in `.grad` are clipped there; of those in pages the update's copies are.
        assert same(it.gradients(), of(parameters) if place == "in .grad" else gradients)
        assert same(it.updated_with(), of(parameters))
        assert it.clipping.take(0).is_identity  # once


@pytest.mark.parametrize("place", IN_PAGES)
def test_a_clip_is_forgotten_with_its_gradients(disk: Path, place: str) -> None:
    gradients, others = random_gradients(), random_gradients(1)
    with run(disk, place) as it:
        it.backward(gradients)
        clip(it, "value")
        for flat in it.flats:
            flat.gradient.clear()
        it.backward(others)
        assert torch.equal(it.clipping.norm(0, 2.0, None), nn.utils.get_total_norm(others))
        assert it.clipping.take(0).is_identity
        clip(it, "norm")
        parameters = plain(others)
        clip_plainly("norm", parameters)
        assert same(it.updated_with(), of(parameters))  # and not by value, too


@pytest.mark.parametrize("place", PLACES)
def test_each_optimizer_has_clips_of_its_own(disk: Path, place: str) -> None:
    def two(module: Net) -> list[Optimizer]:
        head, *others = module.parameters()
        return [SGD([head], lr=0.1), SGD(others, lr=0.1)]

    gradients = random_gradients()
    with run(disk, place, two) as it:
        it.backward(gradients)
        it.clipping.by_value(1, 0.5, None)
        assert torch.equal(it.clipping.norm(0, 2.0, None), nn.utils.get_total_norm(gradients[:1]))
        assert it.clipping.take(0).is_identity
        clamped = [gradient.clamp(-0.5, 0.5) for gradient in gradients[1:]]
        assert torch.equal(it.clipping.norm(1, 2.0, None), nn.utils.get_total_norm(clamped))
        assert same(it.updated_with(1)[1:], clamped)


# -- loss scale -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_loss_scale_is_taken_off_before_the_clips_and_once(disk: Path, place: str) -> None:
    gradients, scale = random_gradients(), LossScale(SCALE)
    parameters = plain(gradients)
    with run(disk, place) as it:
        it.backward([gradient * SCALE for gradient in gradients])
        norm = it.clipping.norm(0, 2.0, scale)
        assert torch.equal(norm, nn.utils.get_total_norm(gradients))  # a power of two rounds nothing
        assert not it.clipping.unscales(0)
        it.clipping.unscale(0, scale)
        assert it.clipping.unscales(0)
        for how in ("value", "norm"):
            clip(it, how, scale)
            clip_plainly(how, parameters)
        assert same(it.gradients(), [gradient * SCALE for gradient in gradients])  # in `.grad`, too: it is scaled there
        assert same(it.updated_with(), of(parameters))
        assert not it.clipping.unscales(0) and it.clipping.take(0).is_identity


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", PLACES)
def test_one_element_that_is_not_finite_is_found(disk: Path, place: str, bad: float) -> None:
    gradients = random_gradients()
    with run(disk, place) as it:
        assert it.clipping.all_finite(0)  # none
        it.backward(gradients)
        free = it.made.allocator.free_bytes(Tier.DEVICE)
        assert it.clipping.all_finite(0)
        for flat in it.flats:
            flat.gradient.clear()
        gradients[1][17] = bad
        it.backward(gradients)
        assert not it.clipping.all_finite(0)
        assert it.made.allocator.free_bytes(Tier.DEVICE) == free


def test_what_is_not_finite_on_another_rank_is_not_finite_here(disk: Path) -> None:
    twin = Twin()
    with run(disk, communicator=twin) as it:
        it.backward(random_gradients())
        assert it.clipping.all_finite(0)
        twin.their_values = torch.tensor([1])
        assert not it.clipping.all_finite(0) and twin.issued == ["maximum", "maximum"]
