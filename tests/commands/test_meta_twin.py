"""Twins of modules on the meta device: the same structure, and the module as it was."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from kit.fits import quiet_trainer
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_ptm.commands.meta_twin import meta_twin
from lightning_ptm.errors import ConfigError


class Cache:
    """An object of the user's that keeps tensors, and refers to a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.angles = torch.ones(4)


class Net(L.LightningModule):
    """Keeps all that modules keep: ties, buffers, lists, a metric, bound methods, a data set, and what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.embedding.weight.tag = "no decay"  # type: ignore[attr-defined]
        self.metric = MeanMetric()
        self.cache = Cache(self)
        self.call = self.normed.forward
        self.partial = partial(self.normed.forward)
        self.losses: list[float] = []
        self.loose = [nn.Parameter(torch.ones(3)), torch.ones(2)]
        self.lock = threading.Lock()
        self.data = TensorDataset(torch.ones(5, 4))
        self.array = np.zeros(3)

    def training_step(self, batch: Tensor) -> Tensor:
        self.losses.append(1.0)
        self.metric.update(1.0)
        x = self.embedding(batch) + self.cache.angles + self.positions[:4]
        return self.head(self.partial(self.call(x))).mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.zeros(4, 4, dtype=torch.long))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_twin_has_the_structure_and_no_values() -> None:
    module = Net()
    twin: Any = meta_twin(module)
    assert type(twin) is Net and twin.device.type == "meta"
    assert [name for name, _ in twin.named_modules()] == [name for name, _ in module.named_modules()]
    for (name, ours), (theirs_name, theirs) in zip(twin.state_dict().items(), module.state_dict().items(), strict=True):
        assert (name, ours.shape, ours.dtype) == (theirs_name, theirs.shape, theirs.dtype) and ours.is_meta
    assert twin.head.weight is twin.embedding.weight and twin.head.weight.tag == "no decay"
    assert twin.call.__self__ is twin.normed and twin.cache.module is twin and twin.cache.angles.is_meta
    assert all(each.is_meta for each in (*twin.loose, twin.scratch, twin.metric.mean_value))
    assert twin.lock is module.lock and twin.data is module.data and twin.array is module.array
    loss = twin.training_step(torch.zeros(2, 4, dtype=torch.long, device="meta"))
    assert loss.is_meta and loss.requires_grad


def test_the_module_stays_as_it_is() -> None:
    module = Net()
    before, names = copy.deepcopy(module.state_dict()), set(vars(module))
    where = {name: value.data_ptr() for name, value in module.state_dict().items()}
    twin: Any = meta_twin(module).to(torch.bfloat16).requires_grad_(False)
    twin.training_step(torch.zeros(2, 4, dtype=torch.long, device="meta"))
    twin.embedding.weight.tag = "changed"
    twin.eval()
    assert module.losses == [] and module.metric.update_count == 0 and module.training
    assert set(vars(module)) == names and module.embedding.weight.tag == "no decay"  # type: ignore[attr-defined]
    assert all(parameter.requires_grad for parameter in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) and value.data_ptr() == where[name]


def test_modules_of_a_trainer_and_compiled_ones_have_twins() -> None:
    module = Net()
    trainer = quiet_trainer("auto", max_steps=1, limit_val_batches=0)
    trainer.fit(module)
    twin: Any = meta_twin(module)
    assert module.trainer is trainer
    with pytest.raises(RuntimeError, match="not attached"):
        _ = twin.trainer
    inner = nn.Sequential(nn.Linear(2, 2))
    outer = nn.ModuleDict({"inner": torch.compile(inner)})  # type: ignore[dict-item]
    assert type(meta_twin(torch.compile(inner))) is nn.Sequential  # type: ignore[arg-type]
    assert type(meta_twin(outer).inner) is nn.Sequential


def test_what_has_no_twin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.weight has no shape before the first forward \(a lazy module\)"):
        meta_twin(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ConfigError, match="Sequential contains a module of TorchScript"):
        meta_twin(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
