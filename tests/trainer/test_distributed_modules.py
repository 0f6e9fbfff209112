"""Modules that somebody else has distributed (DTensors, FSDP, DDP) are refused, wherever a user does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from kit.fits import quiet_trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError
from lightning_ptm.parallel.distributed import refuse_distributed

WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], list[str]]] = {
    "parallelize_module": (
        lambda layer: parallelize_module(layer, init_device_mesh("cpu", (1,)), ColwiseParallel()),
        [
            "layer.weight is a DTensor",
            "plan of tensor_parallel",
            "RowwiseParallel of lightning_ptm.parallel mean the same",
        ],
    ),
    "distribute_module": (
        lambda layer: distribute_module(layer, init_device_mesh("cpu", (1,))),
        ["layer.weight is a DTensor", "distribute_module", "plan of tensor_parallel"],
    ),
    "fully_shard": (
        lambda layer: fully_shard(layer, mesh=init_device_mesh("cpu", (1,))),
        ["layer.weight is a DTensor", "leave out fully_shard"],
    ),
    "DistributedDataParallel": (
        DistributedDataParallel,
        ["layer is a DistributedDataParallel", "leave the wrapper out"],
    ),
}


class Early(BoringModel):
    def __init__(self, distribute: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer = distribute(self.layer)  # type: ignore[assignment]


class Late(BoringModel):
    def __init__(self, distribute: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.distribute = distribute

    def configure_model(self) -> None:
        self.layer = self.distribute(self.layer)  # type: ignore[assignment]


class InSetup(Late):
    def configure_model(self) -> None:
        pass

    def setup(self, stage: str) -> None:
        self.layer = self.distribute(self.layer)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("verb", ["fit", "validate"])
@pytest.mark.parametrize("module", [Early, Late, InSetup])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_in_a_sentence_with_the_remedy(
    way: str, module: Callable[[Callable[[nn.Module], nn.Module]], BoringModel], verb: str
) -> None:
    distribute, words = WAYS[way]
    trainer = quiet_trainer(AngelPTMStrategy(), fast_dev_run=1)
    with pytest.raises(ConfigError) as refused:
        getattr(trainer, verb)(module(distribute))
    assert [word for word in words if word not in str(refused.value)] == [], refused.value


def test_so_is_fsdps_first_version() -> None:
    """Which needs an accelerator to be made as usual."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    with pytest.raises(ConfigError, match=r"inside is a FullyShardedDataParallel.*leave the wrapper out"):
        refuse_distributed(nn.ModuleDict({"inside": wrapper}))
