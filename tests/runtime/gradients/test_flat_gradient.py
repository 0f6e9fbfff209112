"""Gradients of one flat on each route: what is where after they are collected, used, cleared, given away; and `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import NUMEL, OnePage, Parts, parts
from torch import Tensor

from lightning_ptm.errors import CapacityError, InternalError, UsageError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.planning.sharding import ShardGroup
from lightning_ptm.runtime.deciding.gradient_route import GradientUse, Passes, Until, Waits, route
from lightning_ptm.runtime.gradients.flat_gradient import FlatGradient
from lightning_ptm.runtime.gradients.store import GradientPages, HostAccumulator, InFlight
from lightning_ptm.runtime.gradients.view import GradPlaceholder
from lightning_ptm.terms import Tier
from lightning_ptm.update.gradient_source import ParameterGradients, ShardGradient, Transform

PLACES: dict[str, tuple[Waits, Tier, dict[str, Any]]] = {
    "in .grad": (Waits.IN_GRAD, Tier.DEVICE, {}),
    "kept on the device": (Waits.KEPT, Tier.DEVICE, {"passes": Passes.COPIED, "until": Until.STEP}),
    "kept in RAM": (Waits.KEPT, Tier.HOST, {"until": Until.STEP}),
    "kept on disk": (Waits.KEPT, Tier.DISK, {"until": Until.STEP}),
    "from the first in RAM": (Waits.FROM_FIRST, Tier.HOST, {}),
    "from the first on disk": (Waits.FROM_FIRST, Tier.DISK, {}),
    "passing": (Waits.PASSING, Tier.DEVICE, {"passes": Passes.COPIED}),
    "travelling in RAM": (Waits.QUEUED, Tier.HOST, {"lock_free": True}),
    "travelling on disk": (Waits.QUEUED, Tier.DISK, {"lock_free": True}),
    "sums in RAM": (Waits.KEPT, Tier.HOST, {"until": Until.STEP}),
    "travelling sums": (Waits.QUEUED, Tier.HOST, {"lock_free": True}),
}
"""Places of sums: as on a device, new gradients are added when the sum is read or waited for."""
IN_PAGES = [place for place in PLACES if place != "in .grad"]


def use_of(**asked: Any) -> GradientUse:
    """Returns the use of a gradient that one rank has, which is updated in the backward."""
    return GradientUse(**{"until": Until.BACKWARD, "passes": Passes.AS_LEFT, **asked})


class One:
    """The gradient of one flat: a weight and a bias that fill one page of fp32, of each rank."""

    def __init__(self, made: Parts, place: str, dtype: torch.dtype, **asked: Any) -> None:
        waits, tier, questions = PLACES[place]
        self.parts = made
        (store,) = made.flats
        several = {"passes": Passes.COPIED} if made.communicator.world_size > 1 else {}
        chosen = route(tier, dtype, use_of(**{**questions, **several, **asked}))
        assert chosen.waits is waits
        sets = [made.allocator.allocate("set", NUMEL, dtype, tier) for _ in range(2)] if "travel" in place else []
        self.travelling = GradientPages(sets)
        self.supply = self.travelling.supply(NUMEL, dtype) if sets else made.supply(store, chosen)
        in_ram = HostAccumulator(CpuBackend()) if "sums" in place else None
        self.before_change: Callable[[], None] = lambda: None
        self.gradient = FlatGradient(
            store,
            chosen,
            made.allocator,
            made.sharing,
            self.supply,
            InFlight(),
            in_ram,
            before_change=lambda: self.before_change(),
        )
        self.weight, self.bias = store.binding.parameters
        self.free = made.device_pages_free

    def backward(self, weight: float | None, bias: float | None) -> None:
        """Assigns gradients as autograd leaves them, when the unit's backward has ended."""
        self.gradient.view.hide()
        for parameter, value in ((self.weight, weight), (self.bias, bias)):
            if value is not None:
                new = torch.full(parameter.shape, value, dtype=parameter.dtype)
                parameter.grad = new if parameter.grad is None else parameter.grad + new
        self.gradient.collect()

    def step(self, *, clipped: bool = False, scratch: bool = False) -> None:
        """A step whose update has got the gradient and has read it."""
        self.gradient.hand_over()
        self.gradient.step_ends(clipped=clipped, scratch=scratch)

    def values(self) -> list[float]:
        """Returns the gradients of the weight and the bias, in whatever place; all elements are equal."""
        if self.gradient.in_place:
            found = [self.weight.grad, self.bias.grad]
        else:
            whole = self.gradient.shard.on_device()
            found = [self.gradient.store.binding.arrangement.view(whole, slot).clone() for slot in range(2)]
            self.gradient.shard.settle()
        assert all(each is None or each.unique().numel() == 1 for each in found)
        return [0.0 if each is None else float(each.flatten()[0]) for each in found]

    @property
    def taken(self) -> int:
        """Device pages that are not free, once what is on its way has left."""
        self.gradient.shard.settle()
        return self.free - self.parts.device_pages_free


@contextmanager
def one(
    place: str, disk: Path, *, dtype: torch.dtype = torch.float32, device_pages: int = 8, **asked: Any
) -> Iterator[One]:
    with parts(OnePage(), (), disk=disk if "disk" in place else None, device_pages=device_pages) as made:
        yield One(made, place, dtype, **asked)


def grad(parameter: Any) -> Tensor:
    assert isinstance(parameter.grad, Tensor)
    return parameter.grad


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_several_passes_add_up_where_they_wait(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        assert not it.gradient.any
        it.backward(1.0, None)
        assert list(it.gradient.view.present()) == [True, False] and it.gradient.any
        it.backward(2.0, 5.0)
        assert list(it.gradient.view.present()) == [True, True] and it.values() == [3.0, 5.0]
        own = it.gradient.route.own_pages is Tier.DEVICE
        assert it.taken == own
        assert (it.weight.grad is None) == (it.bias.grad is None) == (not it.gradient.in_place)  # I3
        it.backward(None, None)
        assert it.values() == [3.0, 5.0]


@pytest.mark.parametrize("place", IN_PAGES)
def test_what_one_of_several_ranks_holds_whole_is_the_mean_over_their_losses(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        (store,), sharing = it.parts.flats, ShardGroup((Axis.DATA,), (0,), losses=8, scaled_by=2)
        it.gradient = FlatGradient(store, it.gradient.route, it.parts.allocator, sharing, it.supply, InFlight())
        it.backward(1.0, 8.0)
        it.backward(3.0, None)
        assert it.values() == [1.0, 2.0]
        it.gradient.view.show()
        with pytest.raises(UsageError, match="on several ranks each rank has only its shard of the gradient"):
            grad(it.weight).sum()


@pytest.mark.parametrize("place", IN_PAGES)
def test_sums_of_16_bits_are_fp32(disk: Path, place: str) -> None:
    with parts(OnePage(), (), disk=disk, dtype=torch.bfloat16, gradient_itemsize=4) as made:
        (flat,) = made.flats
        it = One.__new__(One)
        _, tier, questions = PLACES[place]
        numel = flat.layout.shard_numel
        sets = [made.allocator.allocate("set", numel, torch.float32, tier)] if "travel" in place else []
        chosen = route(tier, torch.float32, use_of(**{**questions, "passes": Passes.COPIED}))
        supply = GradientPages(sets).supply(numel, torch.float32) if sets else made.supply(flat, chosen)
        gradient = FlatGradient(flat, chosen, made.allocator, made.sharing, supply, InFlight())
        it.gradient, (it.weight, it.bias), it.parts = gradient, flat.binding.parameters, made
        for value in (256.0, 1.0, 1.0):
            it.backward(value, value)
        assert it.values() == [258.0, 258.0]  # in bf16 256 + 1 is 256


@pytest.mark.parametrize("place", PLACES)
def test_a_sparse_gradient_is_refused_by_its_parameters_name(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.weight.grad = torch.ones(it.weight.shape).to_sparse()
        with pytest.raises(UsageError, match=r"the gradient of weight is sparse .* use sparse=False in its embedding"):
            it.gradient.collect()
            it.gradient.source()
        it.gradient.clear()


@pytest.mark.parametrize("place", PLACES)
def test_cleared_gradients_are_gone_and_the_next_ones_start_anew(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.backward(1.0, 2.0)
        it.gradient.clear()
        assert not it.gradient.any and it.weight.grad is None is it.bias.grad
        it.backward(4.0, None)
        assert it.values() == [4.0, 0.0] and list(it.gradient.view.present()) == [True, False]


@pytest.mark.parametrize("place", PLACES)
def test_pages_of_passing_gradients_alone_are_given_back_when_they_are_used(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.backward(1.0, 2.0)
        before = it.taken
        it.gradient.used()
        assert it.taken == before, "no update has got it"
        it.gradient.hand_over()
        it.gradient.used()
        passing = it.gradient.route.waits is Waits.PASSING
        assert (it.gradient.shard.pages is None) == (passing or it.gradient.in_place)
        assert it.taken == before - passing
        if passing:
            it.gradient.step_ends(clipped=False, scratch=False)
            it.gradient.clear()
            it.backward(4.0, 4.0)
            assert it.values() == [4.0, 4.0]


@pytest.mark.parametrize("place", PLACES)
def test_what_was_handed_over_is_dropped_from_grad(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.backward(1.0, 2.0)
        it.gradient.hand_over()
        it.gradient.drop_handed()
        assert it.weight.grad is None and it.gradient.handed and not it.gradient.any
        it.gradient.clear()
        assert it.gradient.handed, "its step is still to come"
        with pytest.raises(InternalError, match="flat 0 is in state HANDED"):
            it.gradient.hand_over()
        it.gradient.give_up_step()
        assert not it.gradient.handed and not it.gradient.any


@pytest.mark.parametrize("place", IN_PAGES)
def test_gradients_that_come_behind_the_update_of_their_step_are_refused(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.backward(1.0, 2.0)
        it.gradient.hand_over()
        with pytest.raises(UsageError, match=r"gradients arrived for weight and .* after their update of this step"):
            it.backward(1.0, 2.0)
        assert grad(it.weight).eq(1).all()


@pytest.mark.parametrize("place", PLACES)
def test_pages_are_reserved_once(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.gradient.reserve()
        pages = it.gradient.shard.pages
        assert (pages is None) == it.gradient.in_place
        it.gradient.reserve()
        it.backward(1.0, 1.0)
        assert it.gradient.shard.pages is pages
        assert pages is None or pages.tier is PLACES[place][1]


@pytest.mark.parametrize("place", PLACES)
def test_the_update_reads_the_place(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        if not it.gradient.in_place:
            with pytest.raises(InternalError, match="flat 0 has no gradient to update with"):
                it.gradient.source()
        it.backward(1.0, None)
        source = it.gradient.source()
        assert isinstance(source, ParameterGradients if it.gradient.in_place else ShardGradient)
        assert list(source.present(it.gradient.store.layout)) == [True, False]


@pytest.mark.parametrize("place", [place for place in PLACES if "travel" in place or place == "in .grad"])
def test_a_gradient_that_is_given_away_leaves_nothing(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.backward(1.0, 2.0)
        source, after, give_back = it.gradient.detach()
        for transfer in after:
            transfer.wait(host=True)
        assert not it.gradient.any and it.gradient.shard.pages is None and it.weight.grad is None
        it.gradient.step_ends(clipped=False, scratch=False)
        it.gradient.clear()
        it.backward(4.0, 4.0)
        assert it.values() == [4.0, 4.0]
        if isinstance(source, ShardGradient):
            assert source.paged is not it.gradient.shard.pages
            assert it.parts.read(source.paged).unique().tolist() == [1.0, 2.0]
            give_back()
            assert it.travelling.take(NUMEL, torch.float32) is source.paged
        assert it.taken == 0


@pytest.mark.parametrize("place", [place for place in PLACES if "travel" in place or place == "in .grad"])
def test_a_duplicate_leaves_the_gradient(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        it.backward(1.0, 2.0)
        source, after, give_back = it.gradient.duplicate()
        for transfer in after:
            transfer.wait(host=True)
        it.gradient.transform_(Transform(clip=torch.tensor(0.5)))
        assert it.values() == [0.5, 1.0]
        if isinstance(source, ShardGradient):
            assert it.parts.read(source.paged).unique().tolist() == [1.0, 2.0]
        else:
            assert [float(each.flatten()[0]) for each in source.tensors()] == [1.0, 2.0]
        give_back()


@pytest.mark.parametrize("place", ["kept in RAM", "kept on disk"])
def test_what_runs_out_of_pages_has_changed_nothing(disk: Path, place: str) -> None:
    with one(place, disk, device_pages=2) as it:
        it.backward(1.0, 2.0)
        it.gradient.shard.settle()
        # A sum on disk needs two pages, one in RAM one.
        taken = [it.parts.paged(torch.ones(8), Tier.DEVICE) for _ in range(1 if place == "kept on disk" else 2)]
        free = it.parts.device_pages_free
        with pytest.raises(CapacityError, match="flat 0"):
            it.backward(4.0, None)
        assert it.parts.device_pages_free == free and it.weight.grad is not None and it.weight.grad.eq(4).all()
        for each in taken:
            it.parts.allocator.release(each)
        it.gradient.collect()
        assert it.values() == [5.0, 2.0] and it.weight.grad is None


@pytest.mark.parametrize("place", PLACES)
def test_transforms_and_zeros_come_behind_who_still_reads(disk: Path, place: str) -> None:
    with one(place, disk) as it:
        seen: list[list[float]] = []
        it.backward(1.0, 6.0)
        it.before_change = lambda: seen.append(it.values())
        it.gradient.transform_(Transform(clamp=2.0))
        assert it.values() == [1.0, 2.0]
        it.gradient.zero()
        assert it.values() == ([1.0, 2.0] if it.gradient.in_place else [0.0, 0.0])
        assert seen == [[1.0, 6.0], [1.0, 2.0]]  # once each
        assert it.gradient.any


# -- several ranks --------------------------------------------------------------------------------------------------------


@contextmanager
def of_two(place: str, disk: Path) -> Iterator[One]:
    with parts(OnePage(double=True), (), disk=disk, device_pages=4, world_size=2) as made:
        yield One(made, place, torch.float32)


TWO = [place for place in IN_PAGES if "travel" not in place]


@pytest.mark.parametrize("place", TWO)
def test_ranks_reduce_to_their_shard_of_the_mean(disk: Path, place: str) -> None:
    with of_two(place, disk) as it:
        for mine, other in ((2.0, 4.0), (1.0, 1.0)):
            it.parts.communicator.theirs = torch.full((2 * NUMEL,), other)
            it.backward(mine, mine)
            assert it.gradient.shard.in_flight and it.weight.grad is None  # under way; nobody has waited
        assert it.gradient.shard.on_device().eq(4.0).all()  # (2 + 4) / 2 + (1 + 1) / 2
        it.gradient.shard.settle()
        assert not it.gradient.shard.in_flight
        assert it.taken == (it.gradient.route.own_pages is Tier.DEVICE)
        assert it.parts.communicator.issued == ["reduce 0", "reduce 0"]


def test_a_rank_without_gradients_gives_zeros(disk: Path) -> None:
    with of_two("kept in RAM", disk) as it:
        it.parts.communicator.theirs = torch.full((2 * NUMEL,), 3.0)
        it.gradient.collect([True, False])
        assert list(it.gradient.view.present()) == [True, False]
        assert it.gradient.shard.on_device().eq(1.5).all()


def test_a_reduction_without_room_leaves_the_gradient(disk: Path) -> None:
    with of_two("kept in RAM", disk) as it:
        taken = [it.parts.paged(torch.ones(8), Tier.DEVICE) for _ in range(2)]
        with pytest.raises(CapacityError, match="flat 0 reduced gradient"):
            it.backward(2.0, 2.0)
        assert it.parts.device_pages_free == 2 and it.parts.communicator.issued == []
        it.parts.allocator.release(taken[0])
        it.gradient.collect()
        assert it.gradient.shard.on_device().eq(1).all()


@pytest.mark.parametrize("place", ["kept in RAM", "kept on disk", "passing"])
def test_device_pages_of_a_reduction_under_way_are_waited_for(disk: Path, place: str) -> None:
    with of_two(place, disk) as it:
        it.backward(1.0, 1.0)
        own = it.gradient.route.own_pages is Tier.DEVICE
        assert not it.gradient.shard.release(wait=False) and it.free - it.parts.device_pages_free == 3
        assert it.gradient.shard.release(wait=True)
        assert it.free - it.parts.device_pages_free == own
        assert not it.gradient.shard.release(wait=True) and it.gradient.shard.on_device().eq(0.5).all()


def test_device_pages_of_what_has_left_are_given_back(disk: Path) -> None:
    with one("kept on disk", disk) as it:
        it.backward(1.0, 1.0)
        assert it.free - it.parts.device_pages_free == 1
        assert it.gradient.shard.release(wait=True) and not it.gradient.shard.in_flight
        assert it.parts.device_pages_free == it.free
        assert not it.gradient.shard.release(wait=True)


def test_a_reduction_under_way_is_shown_and_zeroed_as_one_that_has_ended(disk: Path) -> None:
    with of_two("kept in RAM", disk) as it:
        it.backward(1.0, 1.0)
        it.gradient.view.show()
        assert isinstance(it.weight.grad, GradPlaceholder)
        it.gradient.shard.settle()  # its way to RAM, for which nobody has waited
        assert not it.gradient.shard.in_flight
        it.backward(1.0, 1.0)
        it.gradient.zero()
        assert it.gradient.shard.on_device().eq(0).all() and it.gradient.any
        it.gradient.clear()
        it.backward(1.0, 1.0)  # into pages that hold nothing yet
        it.gradient.zero()
        assert it.gradient.shard.on_device().eq(0).all()


@pytest.mark.parametrize("place", TWO)
def test_a_reduction_under_way_that_is_cleared_does_not_come_back(disk: Path, place: str) -> None:
    with of_two(place, disk) as it:
        it.backward(1.0, 1.0)
        it.gradient.clear()
        assert not it.gradient.any
        it.backward(4.0, 4.0)
        assert it.gradient.shard.on_device().eq(2).all()
        it.gradient.shard.settle()


@pytest.mark.parametrize("look", ["read", "assigned"])
def test_a_part_of_a_gradient_is_not_shown(disk: Path, look: str) -> None:
    with of_two("kept in RAM", disk) as it:
        it.backward(1.0, 1.0)
        it.gradient.shard.settle()
        it.gradient.view.show()
        with pytest.raises(UsageError, match=rf"\.grad of weight was {look}, and on several ranks each rank"):
            if look == "read":
                it.weight.grad + 1
            else:
                it.weight.grad = torch.ones(it.weight.shape)
                it.gradient.apply_user_changes()


def test_sums_of_passes_wait_beside_grad_until_they_are_reduced(disk: Path) -> None:
    with parts(OnePage(), (), disk=disk, dtype=torch.bfloat16, gradient_itemsize=4) as made:
        (flat,) = made.flats
        chosen = route(Tier.HOST, torch.float32, use_of(passes=Passes.COPIED, until=Until.STEP))
        gradient = FlatGradient(flat, chosen, made.allocator, made.sharing, made.supply(flat, chosen), InFlight())
        weight, _ = flat.binding.parameters
        for value in (256.0, 1.0, 1.0):
            weight.grad = torch.full(weight.shape, value, dtype=torch.bfloat16)
            gradient.view.postpone()
            assert weight.grad is None and gradient.view.uncollected() == [True, False] and gradient.shard.pages is None
        gradient.collect()
        assert flat.binding.arrangement.view(gradient.shard.on_device(), 0).unique().tolist() == [258.0]
        assert gradient.view.uncollected() == [False, False]
        gradient.clear()
        weight.grad = torch.ones_like(weight)
        gradient.view.postpone()
        gradient.zero()
        weight.grad = torch.full(weight.shape, 2.0, dtype=torch.bfloat16)
        gradient.collect()
        assert flat.binding.arrangement.view(gradient.shard.on_device(), 0).unique().tolist() == [2.0]


CARRIED = ["kept in RAM", "kept on disk", "kept on the device"]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("target", [*CARRIED, "in .grad"])
@pytest.mark.parametrize("source", CARRIED)
def test_a_gradient_that_the_user_has_still_to_clear_goes_on_in_another_layout(
    disk: Path, source: str, target: str, stepped: bool
) -> None:
    """With what the user has changed; later passes and steps find it."""
    cleared = {"until": Until.CLEARED}
    with one(source, disk, **cleared) as it:
        it.backward(1.0, None)
        if stepped:
            it.step()
        it.gradient.view.show()
        grad(it.weight).mul_(3)
        assert it.gradient.can_be_carried
        carried = it.gradient.carried()
        it.gradient.clear()
        assert not it.gradient.can_be_carried
    with one(target, disk, **cleared) as it:
        it.gradient.carry(carried)
        assert it.values() == [3.0, 0.0] and list(it.gradient.view.present()) == [True, False]
        assert grad(it.weight).eq(3).all() and it.bias.grad is None
        assert it.gradient.waits_for_step(used_are_forgotten=False) == (target != "in .grad")
        assert it.gradient.waits_for_step(used_are_forgotten=True) == (target != "in .grad" and not stepped)
        it.backward(2.0, 5.0)
        assert it.values() == [5.0, 5.0]
        it.step()
        it.gradient.clear()
        assert it.weight.grad is None and not it.gradient.any


def test_a_gradient_that_is_not_all_in_pages_is_not_carried(disk: Path) -> None:
    with one("kept in RAM", disk, until=Until.CLEARED) as it:
        assert not it.gradient.can_be_carried, "there is none"
        it.backward(1.0, 1.0)
        it.gradient.view.show()
        it.bias.grad = None
        it.bias.grad = torch.ones(it.bias.shape)
        assert not it.gradient.can_be_carried
    with one("kept in RAM", disk) as it:  # until the step, which comes
        it.backward(1.0, 1.0)
        assert not it.gradient.can_be_carried
