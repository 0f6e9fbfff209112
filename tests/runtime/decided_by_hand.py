"""Blueprints of small models on machines that are not here, and pages that are laid out by them without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lightning_ptm.comm import Communicators, SoloCommunicator
from lightning_ptm.config import Settings
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.deciding.gradient_route import Waits
from lightning_ptm.runtime.engine.set_up import RunPages
from lightning_ptm.runtime.full_params.gathered_parameters import GatheredParameters
from lightning_ptm.runtime.full_params.optimizer_values import OptimizerValues
from lightning_ptm.runtime.full_params.parameter_values import ParameterValues
from lightning_ptm.runtime.full_params.sharded_states import AllShardedStates
from lightning_ptm.runtime.machine.machine import Machine
from lightning_ptm.runtime.relayout.gathered_flats import GatheredFlats
from lightning_ptm.runtime.relayout.reused_tensors import ReusedTensors
from lightning_ptm.runtime.units.store import UnitStore
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.terms import Tier

PAGE = 64 * 1024
GIB = 1 << 30
WORKSTATION = Machine(
    device_has_own_memory=False,
    free_device_bytes=0,
    free_host_bytes=24 * GIB,
    free_disk_bytes=1 << 40,
    cores=4,
    ranks=1,
)
"""Whose device memory is RAM."""
CLUSTER = Machine(
    device_has_own_memory=True,
    free_device_bytes=4 * GIB,
    free_host_bytes=24 * GIB,
    free_disk_bytes=1 << 40,
    cores=8,
    ranks=4,
)


class Block(nn.Module):
    """`pages` pages of fp32 parameters."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(pages, PAGE // 4))


class Net(nn.Module):
    """A root with one page, and blocks of one, two, three... pages."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.randn(PAGE // 4))
        self.blocks = nn.ModuleList(Block(index + 1) for index in range(blocks))


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=0.1)


def sgd(parameters: Any) -> Optimizer:
    """Returns an optimizer without states."""
    return SGD(parameters, lr=0.1)


def asked(
    module: nn.Module | None = None,
    optimizers: Callable[[Any], Optimizer] | Sequence[Optimizer] = adam,
    *,
    compute: torch.dtype = torch.float32,
    mixed: bool = False,
    keep_gradients: bool = False,
    gradients_outlive_step: bool = False,
    sums_gradients: bool = False,
    rearranges: bool = False,
    **settings: Any,
) -> Request:
    """Optimizers, or how to make the one of all parameters; settings of the strategy by name."""
    module = Net() if module is None else module
    made = [optimizers(list(module.parameters()))] if callable(optimizers) else optimizers
    units = ["Block"] if any(isinstance(each, Block) for each in module.modules()) else "auto"
    return Request(
        module,
        made,
        Settings(**{"page_size": "64KiB", "units": units} | settings),
        compute,
        mixed,
        CpuBackend(),
        keep_gradients,
        gradients_outlive_step,
        sums_gradients,
        rearranges,
    )


def decided(*args: Any, machine: Machine = WORKSTATION, ranks: int = 1, rank: int = 0, **options: Any) -> Blueprint:
    """Decided for what `asked` takes."""
    return decide(asked(*args, **options), machine, ranks, rank=rank)


@dataclass(frozen=True)
class LaidOut:
    """The pages of a run, without the run. The parameters are the module's still: `values.take_over` has not been called."""

    blueprint: Blueprint
    allocator: Allocator
    stores: tuple[UnitStore, ...]
    flats: tuple[tuple[FlatUpdate, ...], ...]
    gathered_flats: GatheredFlats
    values: ParameterValues
    optimizer_values: OptimizerValues
    sharded_kinds: AllShardedStates
    gathered_parameters: GatheredParameters

    def take_over(self, **options: Any) -> None:
        for store in self.stores:
            self.values.take_over(store, **options)


@contextmanager
def laid_out(
    found: Blueprint, disk_paths: Sequence[Any] = (), reused_tensors: ReusedTensors | None = None
) -> Iterator[LaidOut]:
    """On one rank, as the engine does it."""
    kept = reused_tensors or ReusedTensors()
    page = found.layout.page_size
    sizes = {tier: size + kept.more_pages.get(tier, 0) * page for tier, size in found.pool_bytes.items()}
    with Allocator(
        page_size=found.layout.page_size,
        backend=CpuBackend(),
        sizes=sizes,
        disk_paths=list(disk_paths) if sizes[Tier.DISK] else [],
        poison=True,
        reused_extents=kept.reused_extents,
    ) as allocator:
        communicator = SoloCommunicator()
        communicators = Communicators(found.holders.mesh, communicator)
        pages = RunPages(found, allocator, communicators, torch.device("cpu"), kept)
        stores = tuple(pages.store(unit) for unit in range(len(found.units)))
        pages.take_gradient_pages()
        flats = tuple(pages.flats(store) for store in stores)
        for flat in (flat for unit in flats for flat in unit):
            if flat.gradient.route.waits is Waits.KEPT:
                flat.gradient.reserve()
        gathered_flats = GatheredFlats(allocator, communicators, stores, flats, found.holders)
        values, optimizer_values = ParameterValues(gathered_flats, mixed=found.mixed), OptimizerValues(gathered_flats)
        sharded_kinds = AllShardedStates(gathered_flats, optimizer_values, values.original_of)
        yield LaidOut(
            found,
            allocator,
            stores,
            flats,
            gathered_flats,
            values,
            optimizer_values,
            sharded_kinds,
            GatheredParameters(gathered_flats, values),
        )


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
MIXED: dict[str, Any] = {"compute": BF16, "mixed": True}
ON_HOST: dict[str, Any] = {"device_memory": "4MiB", "offload_parameters": "host", "offload_optimizer": "host"}
MASTERS_ON_DISK: dict[str, Any] = {"offload_optimizer": "disk", "disk_path": "/d"}
ALL_ON_DISK: dict[str, Any] = {**MASTERS_ON_DISK, "offload_parameters": "disk"}
LOCK_FREE: dict[str, Any] = {"lock_free": True, "disk_path": "/d"}

RUNS: dict[str, dict[str, Any]] = {
    f"{place}, {kind}": {**where, **how}
    for place, where in {
        "ram": {},
        "host": ON_HOST,
        "masters on disk": MASTERS_ON_DISK,
        "all on disk": ALL_ON_DISK,
        "lock-free": LOCK_FREE,
    }.items()
    for kind, how in {
        "plain": {},
        "mixed": MIXED,
        "kept": {"keep_gradients": True, "sums_gradients": True, **MIXED},
    }.items()
}


class Odd(Net):
    """Model with a frozen block, and a parameter that does not end with a page."""

    def __init__(self) -> None:
        super().__init__(2)
        self.bias = nn.Parameter(torch.zeros(700))
        self.blocks[1].requires_grad_(False)
