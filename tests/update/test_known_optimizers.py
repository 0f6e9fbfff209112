"""Known traits of torch's own optimizers are those that a trial of them finds, for every setting that changes their
states."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from lightning_ptm.update.trial.probe import probe, try_out

SETTINGS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adam, {"fused": False}),
    (optim.Adam, {"foreach": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "lr": torch.tensor(1e-3)}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.RMSprop, {"momentum": 0.9}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in [(7, 5), (7,), (8,)]]


@pytest.mark.parametrize(("cls", "settings"), SETTINGS, ids=lambda value: getattr(value, "__name__", None))
def test_known_as_tried(cls: type[optim.Optimizer], settings: dict[str, Any]) -> None:
    known = probe(cls(parameters(), **settings))
    tried = try_out(cls(parameters(), **settings), dtype=torch.float32, device=torch.device("cpu"))
    assert known.initial is tried.initial
    assert known.name == tried.name
    for ours, theirs in zip(known.groups, tried.groups, strict=True):
        assert {slot.name: slot.dtype for slot in ours.slots} == {slot.name: slot.dtype for slot in theirs.slots}
        assert set(ours.scalars) == set(theirs.scalars)
        assert ours.fused == theirs.fused
        assert not theirs.must_stay_zero
    assert not tried.group_slots
    assert not tried.writes_gradient
    assert not tried.every_gradient


def test_nothing_of_torch_runs() -> None:
    """Whoever replaces or counts `step` of torch's classes sees the steps of the training alone."""
    for cls, settings in SETTINGS:
        optimizer = cls(parameters(), **settings)
        with mock.patch.object(cls, "step") as step, mock.patch.object(cls, "__init__") as init:
            probe(optimizer)
        assert not step.called
        assert not init.called
