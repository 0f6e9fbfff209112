"""Tensors of a module other than parameters move by themselves. To the meta device here, since a CPU has no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_ptm.runtime.tensors.device_moves import move_buffers_and_metrics

META = torch.device("meta")


class Own(nn.Module):
    """Holds a tensor that is no buffer, a layer, and moves both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)
        self.layer = nn.LSTM(2, 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.table = fn(self.table)
        return self


def module() -> nn.ModuleDict:
    metrics = MetricCollection([MulticlassAccuracy(4)])
    return nn.ModuleDict(
        {"norm": nn.BatchNorm1d(2), "mean": MeanMetric(), "metrics": metrics, "own": Own(), "lstm": nn.LSTM(2, 2)}
    )


def test_buffers_metrics_and_what_a_class_moves_itself_are_moved() -> None:
    root: Any = module()
    move_buffers_and_metrics(root, META)
    assert {buffer.device for buffer in root.buffers()} == {META}
    assert root["mean"].device == META and root["mean"].mean_value.device == META
    assert all(each.device == META for each in root["metrics"].values())
    assert root["own"].table.device == META


def test_parameters_stay_the_same_objects_with_the_same_memory() -> None:
    root: Any = module()
    before = {name: (id(each), each.data_ptr()) for name, each in root.named_parameters()}
    move_buffers_and_metrics(root, META)
    assert {name: (id(each), each.data_ptr()) for name, each in root.named_parameters()} == before
    for lstm in (root["lstm"], root["own"].layer):  # which holds them a second time
        assert [id(each) for each in lstm._flat_weights] == [id(each) for each in lstm.parameters()]


def test_what_has_no_memory_yet_stays() -> None:
    with META:
        root = module()
    move_buffers_and_metrics(root, torch.device("cpu"))
    assert {buffer.device for buffer in root.buffers()} == {META}


class Looks(nn.Linear):
    """Layer whose own `_apply` reads parameters, and replaces them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.scale = fn(torch.ones(self.weight.shape[0]))
        self.bias = nn.Parameter(fn(self.bias.detach()))
        return self


def test_a_class_may_look_at_its_parameters_while_it_moves_and_keeps_them() -> None:
    root = nn.Sequential(Looks(2, 3), nn.ModuleList([Looks(2, 3)]))
    before = dict(root.named_parameters())
    move_buffers_and_metrics(root, META)
    assert {name: id(each) for name, each in root.named_parameters()} == {name: id(p) for name, p in before.items()}
    for each in (root[0], root[1][0]):  # type: ignore[index]
        assert each.scale.device == META and each.bias is each._parameters["bias"]
        assert not {"weight", "bias"} & vars(each).keys()


class Fails(Looks):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        raise RuntimeError("cannot move")


def test_one_that_fails_keeps_its_parameters() -> None:
    root = nn.Sequential(Fails(2, 3))
    before = [id(each) for each in root.parameters()]
    with pytest.raises(RuntimeError, match="cannot move"):
        move_buffers_and_metrics(root, META)
    assert [id(each) for each in root.parameters()] == before and not {"weight", "bias"} & vars(root[0]).keys()
