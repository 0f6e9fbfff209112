"""An engine of a small model, driven by hand, on one rank or beside one that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decided_by_hand import PAGE, decided
from small_parts import Twin
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_ptm.comm import Communicators, SoloCommunicator
from lightning_ptm.comm.agreement import Row
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.runtime.engine.engine import Engine, RunInputs
from lightning_ptm.terms import Mode, Tier

WIDTH = 8
HOMES: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "masters on disk": {"offload_optimizer": "disk", "disk_path": "/d"},
    "all on disk": {"offload_optimizer": "disk", "offload_parameters": "disk", "disk_path": "/d"},
    "lock-free": {"offload_optimizer": "disk", "disk_path": "/d", "lock_free": {"max_staleness": 0}},
}


class Block(nn.Module):
    """One page."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((PAGE // 4,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:WIDTH]


class Chain(nn.Module):
    """Two blocks, and a page of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.full((PAGE // 4,), 0.5))
        self.blocks = nn.ModuleList([Block(2.0), Block(3.0)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * self.head[:WIDTH]).sum()


def weights(module: Chain) -> list[float]:
    """The first element of each parameter."""
    return [float(parameter.detach()[0]) for parameter in module.parameters()]


def of_all(module: nn.Module) -> list[Optimizer]:
    return [Adam(list(module.parameters()), lr=0.1)]


class Run:
    """An engine of a module and its one optimizer."""

    def __init__(self, module: Chain, optimizers: Sequence[Optimizer], engine: Engine) -> None:
        self.module = module
        self.engine = engine
        self.optimizers = optimizers

    def forward(self) -> Tensor:
        with self.engine.iteration(Mode.TRAIN):
            loss: Tensor = self.module(torch.arange(1.0, WIDTH + 1))
        return loss

    def backward(self) -> None:
        loss = self.forward()
        with self.engine.backward():
            loss.backward()

    def step(self) -> None:
        self.engine.stepping.step(self.optimizers[0])
        self.engine.stepping.zero_grad(self.optimizers[0], forget=True)

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.stepping.arm(self.optimizers[0])
            self.backward()
            self.step()

    def weights(self) -> list[float]:
        with self.engine.summon.gathered([self.module], write=False):
            return weights(self.module)

    @property
    def live(self) -> list[int]:
        return [store.unit.index for store in self.engine.stores if store.live]


def build(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    disk: Path | None = None,
    *,
    communicator: Any = None,
    change: Callable[[Any], Any] = lambda blueprint: blueprint,
    **settings: Any,
) -> Engine:
    communicator = communicator or SoloCommunicator()
    settings = {"units": ["Block"], **settings}
    blueprint = decided(module, list(optimizers), ranks=communicator.world_size, **settings)
    communicators = Communicators(blueprint.holders.mesh, communicator)
    paths = [disk] if disk is not None and blueprint.pool_bytes[Tier.DISK] else []
    inputs = RunInputs(backend=CpuBackend(), optimizers=optimizers, disk_paths=paths, poison=True)
    return Engine(module, change(blueprint), communicators, inputs)


@contextmanager
def run(
    disk: Path | None = None,
    make: Callable[[Chain], list[Optimizer]] = of_all,
    module: Chain | None = None,
    **asked: Any,
) -> Iterator[Run]:
    module = module or Chain()
    optimizers = make(module)
    engine = build(module, optimizers, disk, **asked)
    try:
        yield Run(module, optimizers, engine)
    finally:
        engine.close()


def plainly(count: int) -> list[float]:
    module = Chain()
    (optimizer,) = of_all(module)
    for _ in range(count):
        module(torch.arange(1.0, WIDTH + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def hooks_on(module: nn.Module) -> list[Any]:
    """Returns the hooks on modules and parameters."""
    found: list[Any] = []
    for each in module.modules():
        found += [*each._forward_hooks, *each._forward_pre_hooks, *each._backward_hooks, *each._state_dict_hooks]
        found += [name for name in ("forward", "state_dict") if name in vars(each)]
    for parameter in module.parameters():
        found += [*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())]
    return found


class Looks(nn.Module):
    """A page of an embedding, as a unit, behind a root without parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(PAGE // 4 // WIDTH, WIDTH, **options)

    def forward(self) -> Tensor:
        found: Tensor = self.table(torch.arange(5))
        return found.sum()


def looks_twice(disk: Path, home: str, **options: Any) -> None:
    module = Looks(**options)
    optimizer = SGD(list(module.parameters()), lr=0.1)
    engine = build(module, [optimizer], disk, **{"units": ["Embedding"], **HOMES[home]})
    try:
        for _ in range(2):
            with engine.iteration(Mode.TRAIN):
                loss = module()
            with engine.backward():
                loss.backward()
            engine.stepping.step(optimizer)
            engine.stepping.zero_grad(optimizer, forget=True)
    finally:
        engine.close()


class Other(Twin):
    """The other rank does as this one does."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def exchange(self, row: Row) -> list[Row]:
        return [row, row]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def fail(self, reason: str) -> None:
        self.failures.append(reason)
