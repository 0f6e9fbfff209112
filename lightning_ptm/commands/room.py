"""Activation memory of a planned run by batch size, and the memory that pages leave to activations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.config import format_bytes
from lightning_ptm.forecasting.counting import UnitWork, anatomy
from lightning_ptm.forecasting.estimate import (
    activation_bytes,
    forwards,
    offloaded_bytes,
    sample_count,
)
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import LARGEST_BATCH
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.forecasting.step_seconds import WAYS
from lightning_ptm.planning.activation_choice import (
    ActivationCosts,
    Handling,
    OffloadTarget,
    UnitCost,
    choose,
    handling_of,
    replay,
)
from lightning_ptm.runtime.autograd.recompute import recomputed_around
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.predicted_memory import PredictedMemory, gradients_before_pages
from lightning_ptm.terms import Phase, Tier


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage of a planned run.

    Attributes:
        index: which one; 0 has the first blocks.
        rank: one of its ranks.
        last: whether it is the last, which computes the loss.
        graphs: micro-batches whose activations it keeps at most, counted for each of its runs of blocks.
        micro_batches: micro-batches of a batch.
        chunks: number of its runs of blocks.
        fetched_once: whether a unit is fetched once for all micro-batches of a batch.
    """

    index: int = 0
    rank: int = 0
    last: bool = True
    graphs: int = 1
    micro_batches: int = 1
    chunks: int = 1
    fetched_once: bool = False

    @property
    def waiting(self) -> float:
        """Most micro-batches whose activations are kept in addition to those of the micro-batch that computes."""
        return max(0, self.graphs - self.chunks) / self.chunks

    def works(self, of_model: Sequence[UnitWork], own: Collection[int]) -> tuple[UnitWork, ...]:
        """Returns the units' work on this stage: others' is none, and the root's end is the last stage's.

        Args:
            own: the units of the stage.
        """
        root, *others = of_model
        own = frozenset(own)
        if root.end is not None and not self.last:
            root = _without_end(root, root.end)
        return (root, *(work if unit in own else UnitWork() for unit, work in enumerate(others, start=1)))

    def checked_bytes(self, of_model: Sequence[UnitWork]) -> int:
        """Returns the bytes of activations in the check that all stages compute the same loss: no graph is kept, and stages
        before the last one compute the head and the loss of a micro-batch, which they do not in training."""
        end = of_model[0].end
        return 0 if end is None or self.last else end.saved_bytes


WHOLE_MODEL = Stage()
"""All units are on every rank."""


def _without_end(root: UnitWork, end: UnitWork) -> UnitWork:
    return dataclasses.replace(
        root,
        flops=root.flops - end.flops,
        saved_bytes=root.saved_bytes - end.saved_bytes,
        attention_flops=root.attention_flops - end.attention_flops,
        curved_numel=root.curved_numel - end.curved_numel,
        moved_bytes=root.moved_bytes - end.moved_bytes,
        kernels=root.kernels - end.kernels,
        sent=root.sent - end.sent,
        sent_back=root.sent_back - end.sent_back,
        end=None,
    )


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations of one batch.

    Attributes:
        ticks: bytes on the device at each tick.
        works: the units' work.
        handlings: by unit, what becomes of what it saves.
        recomputed: the units that are recomputed.
        offloaded: bytes that are offloaded until the backward, by tier; of one micro-batch.
        graphs: micro-batches whose activations exist at once; a fraction where stages have several runs of blocks.
        checked_bytes: bytes on the device in the check of stages.
    """

    ticks: tuple[int, ...]
    works: tuple[UnitWork, ...]
    handlings: tuple[Handling, ...]
    recomputed: frozenset[int]
    offloaded: Mapping[Tier, int]
    graphs: float
    checked_bytes: int

    def peaks(self) -> dict[Tier, int]:
        """Returns the most bytes by tier."""
        away = {tier: int(self.graphs * size) for tier, size in self.offloaded.items()}
        return {Tier.DEVICE: max(*self.ticks, self.checked_bytes), **away}


def _ends_with(works: Sequence[UnitWork]) -> dict[int, int]:
    return {unit: work.ends_with for unit, work in enumerate(works) if work.ends_with is not None}


_STEPS_BY_SIZE = 6
"""Most batches that are tried since the growth of activations suggests them."""


class Sizes:
    """Activation memory of a planned run, by batch size.

    Args:
        recomputed: units that settings have recomputed.
        stage: the pipeline stage of the blueprint. Batches of pipelines are micro-batches here.
        slices: by unit among `recomputed`, the number of slices that it is computed on.

    Attributes:
        own_units: the stage's units, in order, without the root.
    """

    def __init__(
        self,
        run: PlannedRun,
        blueprint: Blueprint,
        recomputed: frozenset[int],
        stage: Stage,
        slices: Mapping[int, int] | None = None,
    ) -> None:
        # Configuration.
        self._run = run
        self._blueprint = blueprint
        self._recomputed = recomputed
        self._stage = stage
        self._slices = slices or {}
        # With undivided experts each expert is recomputed on its own: of thousands, few get tokens.
        self._around = recomputed_around(blueprint.units, recomputed) if blueprint.by_need else {}
        self._choose: Callable[[Sequence[UnitWork]], Sequence[Handling]] | None = None
        # State.
        self._known: dict[int, Activations] = {}
        run.model.to(run.request.compute)
        self._anatomy = anatomy(run.model, blueprint.units)
        self.own_units = tuple(sorted({tick.unit for tick in blueprint.trace.ticks} - {0}))
        self._gradients = gradients_before_pages(blueprint)

    def choose_with(self, choose: Callable[[Sequence[UnitWork]], Sequence[Handling]] | None) -> None:
        """Sets the function that chooses the handlings of units from their work; None: all are as settings say, and kept
        where they leave the choice to the run."""
        if choose is not None or self._choose is not None:
            self._choose = choose
            self._known = {}

    @property
    def chooses(self) -> bool:
        """Whether handlings are chosen."""
        return self._choose is not None

    def follow(self, blueprint: Blueprint) -> None:
        """Takes the routes of gradients from another blueprint of the run."""
        gradients = gradients_before_pages(blueprint)
        if gradients != self._gradients:
            self._gradients, self._known = gradients, {}

    @property
    def gradient_bytes(self) -> int:
        """Device bytes of gradients in `.grad` that are on their way to pages: the root's and those of another unit."""
        return self._gradients[0] + max(self._gradients[1:], default=0)

    def works(self, samples: int) -> tuple[UnitWork, ...]:
        """Returns the units' work."""
        return self._stage.works(self.whole_model(samples), self.own_units)

    def hidden_bytes(self, samples: int) -> int:
        """Returns the bytes that the first unit after one of the stage's runs of blocks takes; 0 if none follows."""
        works = self.whole_model(samples)
        follows = next(unit for unit in range(self.own_units[0], len(works) + 1) if unit not in self.own_units)
        return works[follows].taken_bytes if follows < len(works) else 0

    def whole_model(self, samples: int) -> tuple[UnitWork, ...]:
        """Returns the work of the units of all stages."""
        return self._run.work(self._blueprint, samples, self._anatomy)

    def at(self, samples: int) -> Activations:
        """Returns the activations of a batch."""
        if samples not in self._known:
            works = self.works(samples)
            handlings = self._fixed() if self._choose is None else tuple(self._choose(works))
            recomputed = frozenset(unit for unit, handling in enumerate(handlings) if handling.recomputes)
            away = {unit: handling.tier for unit, handling in enumerate(handlings) if handling.tier is not None}
            ticks = activation_bytes(
                works,
                recomputed,
                self._blueprint.trace,
                away=away.keys(),
                around=self._around,
                # The check of a unit computes two samples.
                of_slice={
                    unit: work.saved_bytes + work.slice_bytes
                    for unit, count in self._slices.items()
                    for work in [self.works(min(samples, max(2, -(-samples // count))))[unit]]
                },
                gradients=self._gradients,
                ends_with=_ends_with(works),
            )
            offloaded = {
                tier: offloaded_bytes(
                    works, recomputed, self._around, away=[unit for unit, to in away.items() if to is tier]
                )
                for tier in dict.fromkeys(away.values())
            }
            # Of earlier micro-batches, whose backward is to come.
            stay = [unit for unit in (0, *self.own_units) if unit not in away]
            kept = offloaded_bytes(works, recomputed, self._around, away=stay)
            waiting = self._stage.waiting
            ticks = tuple(size + int(waiting * kept) for size in ticks)
            checked_bytes = self._stage.checked_bytes(self.whole_model(samples))
            self._known[samples] = Activations(
                ticks, works, handlings, recomputed, offloaded, 1 + waiting, checked_bytes
            )
        return self._known[samples]

    def _fixed(self) -> tuple[Handling, ...]:
        tier = self._blueprint.activations_to
        units = range(1, len(self._blueprint.units))
        return (Handling.KEEP, *(handling_of(unit in self._recomputed, tier) for unit in units))

    def ends_with(self, wanted: Literal["auto"] | int | None) -> dict[int, int]:
        """Returns, for units whose backward ends with that of another unit, the other one; independent of the batch
        size (see UnitWork)."""
        return _ends_with(self.works(wanted if isinstance(wanted, int) else sample_count(self._run.batch)))

    def largest(self, rooms: Mapping[Tier, int], most: int = LARGEST_BATCH) -> int:
        """Returns the largest batch whose activations fit; 0: not even one sample.

        Args:
            rooms: by tier, bytes that pages leave to activations.
            most: no larger batch is looked at.
        """

        def peak_of(tier: Tier) -> Callable[[int], int]:
            return lambda samples: self.at(samples).peaks().get(tier, 0)

        tiers = (Tier.DEVICE, *self._blueprint.activation_tiers)
        return min(self._largest(rooms[tier], peak_of(tier), most) for tier in tiers)

    @staticmethod
    def _largest(room: int, size_at: Callable[[int], int], most: int = LARGEST_BATCH) -> int:
        least = size_at(1)
        if least > room:
            return 0
        # Activations need not grow linearly: a sliced loss keeps the same logits from some batch on, and chosen handlings use
        # what room there is. The size of one more sample says where to look next, a few times; then halves of the interval.
        samples, too_many = 1, most + 1
        for attempt in itertools.count():
            if samples + 1 == too_many:
                break
            size = size_at(samples)
            each = size_at(samples + 1) - size
            if each > room - size:
                break
            guess = (samples + too_many) // 2
            if attempt < _STEPS_BY_SIZE:
                guess = min(samples + (room - size) // max(1, each), too_many - 1)
            if size_at(guess) > room:
                too_many = guess
            else:
                samples = guess
        return samples


def activation_room(blueprint: Blueprint, takes: PredictedMemory, node: Node) -> int:
    """Bytes of the device tier left to activations at their peak; on a CPU that is RAM, where unused pages take none."""
    if not node.has_own_memory:
        pages = takes.peak(Tier.DEVICE) + takes.peak(Tier.HOST)
        return node.host_memory // node.ranks_per_node - pages - takes.gradients_beside
    return node.device_memory - blueprint.pool_bytes[Tier.DEVICE] - takes.gradients_beside


def rooms(blueprint: Blueprint, takes: PredictedMemory, node: Node) -> dict[Tier, int]:
    """Returns the bytes of one rank that pages leave to activations, by tier."""
    return {
        Tier.DEVICE: activation_room(blueprint, takes, node),
        Tier.HOST: node.host_memory // node.ranks_per_node - blueprint.pool_bytes[Tier.HOST],
        Tier.DISK: blueprint.activation_limit_bytes,
    }


def chosen_handlings(
    blueprint: Blueprint,
    works: Sequence[UnitWork],
    *,
    forward_s: Callable[[Sequence[UnitWork]], Sequence[float]],
    rates: Hardware,
    room: Mapping[Tier, int],
    recomputed: frozenset[int] = frozenset(),
) -> tuple[Handling, ...]:
    """Returns the handlings of all units where a run chooses them: those of `choose`.

    Args:
        forward_s: returns the seconds of each unit's forward.
        room: by tier, bytes that pages leave to activations.
        recomputed: the units that settings have recomputed, of which only the tier of their inputs is chosen.
    """
    costs, order = _costs_of(blueprint, works, forward_s(works), rates, room)
    again = (
        dataclasses.replace(cost, backward_s=cost.backward_s + cost.forward_s, saved_bytes=cost.input_bytes)
        if unit in recomputed
        else cost
        for unit, cost in zip(order, costs.units, strict=True)
    )
    found = dict(zip(order, choose(dataclasses.replace(costs, units=tuple(again))), strict=True))
    return tuple(
        handling_of(unit in recomputed or handling.recomputes, handling.tier)
        for unit in range(len(works))
        for handling in [found.get(unit, Handling.KEEP)]
    )


def waits_s(
    blueprint: Blueprint,
    handlings: Sequence[Handling],
    works: Sequence[UnitWork],
    forward_s: Sequence[float],
    rates: Hardware,
) -> float:
    """Returns the seconds of a micro-batch in which compute waits for copies of activations."""
    costs, order = _costs_of(blueprint, works, forward_s, rates, {})
    ours = [handlings[unit] for unit in order]
    staying = [handling_of(handling.recomputes, None) for handling in ours]
    return replay(costs, ours).seconds - replay(costs, staying).seconds


def _costs_of(
    blueprint: Blueprint,
    works: Sequence[UnitWork],
    forward_s: Sequence[float],
    rates: Hardware,
    room: Mapping[Tier, int],
) -> tuple[ActivationCosts, list[int]]:
    """Returns what `choose` needs to know, with the units in the order of their forwards, and that order."""
    ticks = blueprint.trace.ticks
    order = [*dict.fromkeys(tick.unit for tick in ticks if tick.phase is Phase.FORWARD and tick.unit != 0)]
    units = tuple(
        UnitCost(
            forward_s[unit],
            forwards(Phase.BACKWARD, recomputed=False) * forward_s[unit],
            works[unit].saved_bytes,
            works[unit].input_bytes,
        )
        for unit in order
    )
    targets = {}
    for tier, (there, back) in WAYS.items():
        to = min(rates.bytes_per_s(there), rates.device_to_host_bytes_per_s)
        fro = min(rates.bytes_per_s(back), rates.host_to_device_bytes_per_s)
        if not tier.addressable and rates.shared_cores:
            to, fro = rates.bytes_per_s(there), rates.bytes_per_s(back)
        per_byte = 1 / rates.disk_bytes_per_core_s if rates.shared_cores and rates.disk_bytes_per_core_s else 0.0
        targets[tier] = OffloadTarget(to, fro, room.get(tier, math.inf), per_byte)
    handlings = blueprint.activation_handlings
    allowed = {handling.tier for handling in handlings} if handlings else set(targets)
    return (
        ActivationCosts(
            units,
            room.get(Tier.DEVICE, math.inf),
            works[0].saved_bytes,
            {tier: target for tier, target in targets.items() if tier in allowed},
            recomputes=any(handling.recomputes for handling in handlings),
        ),
        order,
    )


def shortage(tier: Tier, samples: int, taken_bytes: int, room: int, node: Node, *, unified: bool) -> str:
    """Returns why activations do not fit, in a sentence."""
    batch = f"{samples} sample{'' if samples == 1 else 's'}"
    if tier is Tier.DISK:
        return (
            f"activations of {batch} a rank take {format_bytes(taken_bytes)} on disk (offload_activations='disk'), and pages "
            f"leave {format_bytes(room)} of {node.name}'s to them"
        )
    if tier is Tier.HOST:
        return (
            f"activations of {batch} a rank take {format_bytes(taken_bytes)} of RAM "
            f"(offload_activations='host'), and pages leave {format_bytes(max(room, 0))} of {node.name}'s to them"
        )
    return (
        f"activations of {batch} a rank take {format_bytes(taken_bytes)} in addition to the pages, which leave "
        f"{format_bytes(max(room, 0))} of {'RAM' if unified else 'the device tier'} to them on {node.name}"
    )
