"""Result of `lightning-ptm plan` for one run, as data, and the parts of it that come from the run's blueprint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.rates import Timing
from lightning_ptm.planning.plan import Plan
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.inspection import OptimizerBytes
from lightning_ptm.runtime.engine.predicted_memory import PredictedMemory
from lightning_ptm.terms import Kind, Tier


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Forecast bytes in one tier of one rank.

    Attributes:
        page_bytes: bytes of pages in use at the peak.
        reserved_bytes: bytes of all pages that the run reserves at its start. Page-locked and device memory is allocated
            then; other RAM only as pages are used.
        gradient_bytes: peak bytes of gradients that wait in `.grad`, outside of pages.
        activation_bytes: bytes of activations at the peak, outside of pages.
        have_bytes: bytes that the tier has.
    """

    page_bytes: int
    reserved_bytes: int
    gradient_bytes: int
    activation_bytes: int
    have_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Forecast for one run; bytes are those of one rank.

    Attributes:
        config, hardware: names of the config and of the hardware file.
        nodes, ranks, tensor_ranks: numbers of nodes, of ranks, and of ranks in a tensor group.
        numel: parameters of the model.
        fits: whether pages and activations fit their tiers.
        reason: what does not fit.
        homes: for parameters, gradients and master states, bytes by home tier. Gradients that are updated during the backward
            have no home.
        tiers: peak bytes by tier.
        pages: by tier, bytes of the pages that are reserved at the start, by use.
        optimizers: bytes of each optimizer's states on a rank.
        batch_size: samples per rank and micro-batch.
        tokens: tokens of such a batch; None if it is not of tokens.
        accumulate: micro-batches in a step.
        flops: operations of a step.
        matrix_flops_per_s: the hardware file's rate for the dtype.
        timing: timing of an optimizer step; None if the run does not fit.
        seconds: seconds of an optimizer step: those of `timing`, or more in lock-free mode with updates slower than compute.
        binds: the bottleneck of the step, in words.
        steps_per_pass: optimizer steps that one lock-free pass over the master states can serve (`max_staleness`); None:
            updates are synchronous.
        chosen: values that were searched for: an argument of the model, device_memory in bytes.
        plan: the plan of one micro-batch.
        page_ticks: bytes of device pages at each tick and after the last, including ticks of units that are in no plan.
        activation_ticks: bytes of activations, likewise.
        offloaded_bytes: activations of a micro-batch that are offloaded to RAM (`offload_activations="host"`).
        largest_batch: the largest batch that fits, in samples per rank; 0: not even one sample fits; None: the model takes
            only batches of this size.
        looked_at: free memory of this machine at the time of the plan, in words; empty for another machine.
        deepens: the argument of the config's model that makes it deeper but not wider; empty: unknown.
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
    steps_per_pass: int | None = None

    @property
    def flops_per_s(self) -> float:
        """The model's operations per second on one rank, without recomputation."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        batches = self.ranks // self.tensor_ranks
        return batches * self.batch_size * self.accumulate / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks; None if batches are not of tokens."""
        return None if self.tokens is None else self.samples_per_s * self.tokens / self.batch_size


def homes_of(blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """Returns `Prediction.homes` of a blueprint."""
    kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.MASTER)
    found = {kind.value: {tier.name.lower(): 0 for tier in blueprint.budget} for kind in kinds}
    for flat in blueprint.layout.flats:
        homes = blueprint.placement.homes[flat.unit]
        found["parameter"][homes.parameter.name.lower()] += flat.shard_bytes
        if flat.trainable:
            gradient = blueprint.placement.homes[flat.unit].gradient
            if blueprint.placement.keeps_gradients or not gradient.computes:
                found["gradient"][gradient.name.lower()] += flat.gradient_bytes
            found["master"][homes.master.name.lower()] += blueprint.placement.master_bytes(flat)
    return found


def pages_by_use(blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """Returns `Prediction.pages` of a blueprint."""
    return {
        tier.name.lower(): {what.value: size for what, size in blueprint.inventory.by_what(tier).items()}
        for tier in blueprint.budget
    }


def tiers_of(
    blueprint: Blueprint, takes: PredictedMemory, node: Node, activations: Mapping[Tier, int]
) -> dict[str, TierPlan]:
    """Returns `Prediction.tiers` of a blueprint.

    Args:
        takes: the predicted memory of the run.
        activations: by tier, bytes of activations.
    """
    ranks = node.ranks_per_node
    host = node.host_memory // ranks
    have = {
        **blueprint.budget,
        Tier.DEVICE: node.device_memory if node.has_own_memory else host,
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
