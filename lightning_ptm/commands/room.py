"""Activations by batch size, and the room that pages leave to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.config import format_bytes
from lightning_ptm.forecasting.counting import UnitWork, anatomy
from lightning_ptm.forecasting.estimate import activation_bytes, estimate, host_activation_bytes, resized, sample_count
from lightning_ptm.forecasting.node import Node
from lightning_ptm.runtime.autograd.recompute import recomputed_around
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.predicted_memory import PredictedMemory
from lightning_ptm.terms import Tier

LARGEST_BATCH = 1 << 20
"""Samples of a rank; nobody asks for more."""


class Sizes:
    """Activations by batch size."""

    def __init__(self, run: PlannedRun, blueprint: Blueprint, recomputed: frozenset[int]) -> None:
        # Configuration.
        self._run = run
        self._blueprint = blueprint
        self._recomputed = recomputed
        # Where experts are undivided each stands for itself: of thousands, few have tokens.
        self._around = recomputed_around(blueprint.units, recomputed) if blueprint.by_need else {}
        # State.
        self._known: dict[int, tuple[tuple[int, ...], tuple[UnitWork, ...]]] = {}
        run.model.to(run.request.compute)
        self._anatomy = anatomy(run.model, blueprint.units)

    def at(self, samples: int) -> tuple[tuple[int, ...], tuple[UnitWork, ...]]:
        """Bytes of activations at each tick, and what units compute."""
        if samples not in self._known:
            run, blueprint = self._run, self._blueprint
            batch = resized(run.batch, samples)
            works = estimate(
                run.model,
                blueprint.units,
                batch,
                run.request.compute,
                blueprint.experts,
                known=self._anatomy,
                group=run.group,
            )
            to_host = blueprint.activations_to_host
            ticks = activation_bytes(works, self._recomputed, blueprint.trace, to_host=to_host, around=self._around)
            self._known[samples] = ticks, works
        return self._known[samples]

    def ends_with(self, wanted: Literal["auto"] | int | None) -> dict[int, int]:
        """Units whose backward ends with another one's, and that one, which hangs on no size of batch (see UnitWork)."""
        works = self.at(wanted if isinstance(wanted, int) else sample_count(self._run.batch))[1]
        return {unit: work.ends_with for unit, work in enumerate(works) if work.ends_with is not None}

    def offloaded(self, works: Sequence[UnitWork]) -> int:
        """Of what units compute, the bytes that wait in RAM for the backward."""
        return (
            host_activation_bytes(works, self._recomputed, self._around) if self._blueprint.activations_to_host else 0
        )

    def largest(self, room: int, host_room: int) -> int:
        """The largest batch whose activations fit; 0: not even one sample."""
        on_device = self._largest(room, lambda samples: max(self.at(samples)[0]))
        on_host = self._largest(host_room, lambda samples: self.offloaded(self.at(samples)[1]))
        return min(on_device, on_host)

    @staticmethod
    def _largest(room: int, size_at: Callable[[int], int]) -> int:
        least = size_at(1)
        if least > room:
            return 0
        each = max(1, size_at(2) - least)
        samples = min(LARGEST_BATCH, 1 + (room - least) // each)
        while size_at(samples) > room:  # what units keep need not grow evenly
            samples = max(1, min(samples - 1, samples * room // size_at(samples)))
        return samples


def activation_room(blueprint: Blueprint, takes: PredictedMemory, node: Node) -> int:
    """Bytes of the device tier that are left to activations: RAM on a CPU, where pages that are not used take none."""
    if not node.apart:
        pages = takes.peak(Tier.DEVICE) + takes.peak(Tier.HOST)
        return node.host_memory // node.ranks_per_node - pages - takes.gradients_beside
    return node.device_memory - blueprint.pool_bytes[Tier.DEVICE] - takes.gradients_beside


def host_room(blueprint: Blueprint, node: Node) -> int:
    """Bytes of RAM of one rank that pages leave."""
    return node.host_memory // node.ranks_per_node - blueprint.pool_bytes[Tier.HOST]


def shortage(tier: Tier, samples: int, taken_bytes: int, room: int, node: Node, *, unified: bool) -> str:
    """Why activations do not fit, and what to do: a reason of a CapacityError."""
    batch = f"{samples} sample{'' if samples == 1 else 's'}"
    if tier is Tier.HOST:
        return (
            f"activations of {batch} a rank take {format_bytes(taken_bytes)} of RAM "
            f"(activations='host'), and pages leave {format_bytes(max(room, 0))} of {node.name}'s to them; lower "
            f"the batch size, use recompute='all', or lower host_memory"
        )
    return (
        f"activations of {batch} a rank take {format_bytes(taken_bytes)} beside the pages, and the "
        f"device tier of {node.name} leaves {format_bytes(max(room, 0))} to them; lower the batch size, "
        f"use recompute='all', or lower {'host' if unified else 'device'}_memory"
    )
