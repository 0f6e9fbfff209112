"""What `plan` finds for one run, as data; and how homes and bytes of tiers are read off the run's blueprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.rates import Timing
from lightning_ptm.planning.plan import Plan
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.predicted_memory import PredictedMemory
from lightning_ptm.runtime.engine.inspection import OptimizerBytes
from lightning_ptm.terms import Kind, Tier


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of one rank.

    Attributes:
        page_bytes: of pages in use at the peak.
        reserved_bytes: of all pages that the run asks for at its start. Page-locked and device memory is then taken; other
            RAM only as pages are used.
        gradient_bytes: the most that gradients take which wait in `.grad`, beside the pages.
        activation_bytes: at the peak, beside both.
        have_bytes: what there is.
    """

    page_bytes: int
    reserved_bytes: int
    gradient_bytes: int
    activation_bytes: int
    have_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What `plan` found for one run; bytes are of one rank.

    Attributes:
        fits: pages and activations fit their tiers; reason: what does not.
        homes: for parameters, gradients and master states, bytes of each tier. Gradients that pass through the backward
            have none.
        tiers: what is in them at the worst moment.
        pages: by tier, bytes of the pages that are asked for at the start, by what they are for.
        optimizers: what each keeps on a rank.
        batch_size: samples a rank and micro-batch; tokens: of it, where the batch is of tokens.
        flops: of a step; matrix_flops_per_s: what the hardware file has for the dtype.
        timing: of an optimizer step; None where it does not fit.
        seconds: of an optimizer step: the timing's, or more in lock-free mode where updates are slower than compute.
        binds: what the step waits for most.
        chosen: what was searched for: an argument of the model, device_memory in bytes.
        plan: of one micro-batch.
        page_ticks: bytes of device pages at each tick and after the last; activation_ticks: of activations. Ticks of units
            that are in no plan are among them.
        offloaded_bytes: activations of a micro-batch that go to RAM and back (`activations="host"`).
        largest_batch: the largest that fits, in samples a rank; 0: not even one does; None: the model takes no batch of
            another size.
        looked_at: of this machine, what it had free when it was looked at; empty: of another one.
        deepens: the argument of the config's model that makes it deeper and no wider; empty: none is known.
    """

    config: str
    hardware: str
    nodes: int
    ranks: int
    tensor_ranks: int
    numel: int
    fits: bool
    reason: str
    homes: dict[str, dict[str, int]]
    tiers: dict[str, TierPlan]
    pages: dict[str, dict[str, int]]
    batch_size: int
    tokens: int | None
    accumulate: int
    flops: int
    matrix_flops_per_s: float
    timing: Timing | None
    seconds: float
    binds: str
    chosen: dict[str, int]
    plan: Plan
    page_ticks: tuple[int, ...]
    activation_ticks: tuple[int, ...]
    optimizers: tuple[OptimizerBytes, ...] = ()
    offloaded_bytes: int = 0
    largest_batch: int | None = None
    deepens: str = ""
    looked_at: str = ""

    @property
    def flops_per_s(self) -> float:
        """Of one rank, the model's operations: recomputing does not count."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        batches = self.ranks // self.tensor_ranks
        return batches * self.batch_size * self.accumulate / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None else self.samples_per_s * self.tokens / self.batch_size


def homes_of(blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """`Prediction.homes`."""
    kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.MASTER)
    found = {kind.value: {tier.name.lower(): 0 for tier in blueprint.budget} for kind in kinds}
    for flat in blueprint.layout.flats:
        homes = blueprint.placement.homes[flat.unit]
        found["parameter"][homes.parameter.name.lower()] += flat.shard_bytes
        if flat.trainable:
            gradient = blueprint.gradient_home(flat.unit)
            if blueprint.placement.keeps_gradients or not gradient.computes:
                found["gradient"][gradient.name.lower()] += flat.gradient_bytes
            found["master"][homes.master.name.lower()] += blueprint.placement.master_bytes(flat)
    return found


def pages_by_use(blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """`Prediction.pages`."""
    return {
        tier.name.lower(): {what.value: size for what, size in blueprint.inventory.by_what(tier).items()}
        for tier in blueprint.budget
    }


def tiers_of(
    blueprint: Blueprint, takes: PredictedMemory, node: Node, activations: Mapping[Tier, int]
) -> dict[str, TierPlan]:
    """`Prediction.tiers`."""
    ranks = node.ranks_per_node
    host = node.host_memory // ranks
    have = {
        **blueprint.budget,
        Tier.DEVICE: node.device_memory if node.apart else host,
        Tier.HOST: 0 if blueprint.unified else host,
    }
    return {
        tier.name.lower(): TierPlan(
            page_bytes=takes.peak(tier),
            reserved_bytes=blueprint.pool_bytes[tier],
            gradient_bytes=takes.gradients_beside if tier.computes else 0,
            activation_bytes=activations.get(tier, 0),
            have_bytes=have[tier],
        )
        for tier in blueprint.budget
    }
