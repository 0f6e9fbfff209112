"""Step-time forecast for lock-free updates on a CPU that also computes: the inputs of the simulation in
shared_cores.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.forecasting.shared_cores import SharedCoreFlat, SharedCoreRates, SharedCores, SharedCoreTiming
from lightning_ptm.forecasting.update_extras import update_extras
from lightning_ptm.planning.chunks import chunk_bounds_of
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint, LockFreeNeeds
from lightning_ptm.runtime.deciding.build_inventory import taken_dtype
from lightning_ptm.terms import chunk_numel
from lightning_ptm.update.weight_prediction import can_predict_weights


def beside_compute(
    blueprint: Blueprint,
    lock_free: LockFreeNeeds,
    trace: Trace,
    node: Node,
    rates: Hardware,
    accumulate: int,
    among_ranks_s: float,
) -> SharedCoreTiming:
    """Returns the mean timing of a lock-free step while the update thread shares the CPU with compute.

    Args:
        trace: ticks of a micro-batch, with their seconds.
        rates: rates of one rank.
        accumulate: micro-batches in a step.
        among_ranks_s: seconds in which compute waits for other ranks while updates go on.
    """
    layout = blueprint.layout
    update = rates.update_device_bytes_per_s
    beside_update = node.beside_update_bytes_per_s or update * lock_free.cores / node.threads / 2
    extras = update_extras(blueprint, _slowed(rates, beside_update / update))
    flats = [
        SharedCoreFlat(
            unit=flat.unit,
            numel=flat.shard_numel,
            bytes_per_element=blueprint.dtypes[flat.index].itemsize,
            master_bytes_per_element=-(-blueprint.placement.master_bytes(flat) // flat.shard_numel),
            on_disk=not blueprint.placement.homes[flat.unit].master.addressable,
            kind=(flat.shard_numel, blueprint.dtypes[flat.index]),
            can_predict=lock_free.predicts and all(map(can_predict_weights, traits)),
            cuts=chunk_bounds_of(flat, chunk_numel(layout.page_size)),
            extra=extras.get(flat.index),
        )
        for flat in layout.flats
        if (traits := blueprint.traits[flat.index])
    ]
    both = rates.disk_both_bytes_per_s or rates.disk_read_bytes_per_s + rates.disk_write_bytes_per_s
    ram = node.host_memory_bytes_per_s / node.ranks_per_node
    beside = SharedCores(
        flats,
        {(row.numel, taken_dtype(row)): row.count for row in lock_free.spares},
        SharedCoreRates(
            update_bytes_per_s=beside_update,
            loss=1.0 if node.beside_loss is None else node.beside_loss,
            learn_numel_per_s=node.learn_numel_per_s,
            prediction_numel_per_s=node.prediction_numel_per_s,
            sum_bytes_per_s=ram * min(1.0, lock_free.cores / node.threads),
            disk_bytes_per_s=both if math.isfinite(both) else rates.disk_read_bytes_per_s,
        ),
        chunk_numel=chunk_numel(layout.page_size),
        staging=max(1, blueprint.staging_chunks),
        max_staleness=lock_free.max_staleness,
    )
    return beside.run(trace, micro_batches=accumulate, step_s=(node.step_s or 0.0) + among_ranks_s)


def _slowed(rates: Hardware, share: float) -> Hardware:
    """Rates of arithmetic on the share of the cores that the updating thread has while compute runs."""

    def slower(per_s: Mapping[str, float] | None) -> dict[str, float] | None:
        return None if per_s is None else {word: rate * min(1.0, share) for word, rate in per_s.items()}

    return dataclasses.replace(
        rates,
        states_numel_per_s=slower(rates.states_numel_per_s),
        update_flops_per_s=slower(rates.update_flops_per_s),
    )
