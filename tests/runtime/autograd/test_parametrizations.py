"""Parametrizations that are put on within a forward: no write where a parameter keeps its data, and torch's own otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_ptm.runtime.autograd.parametrizations import parametrizing_is_no_write


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Stored(Doubled):
    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


def test_putting_one_on_and_taking_it_off_is_no_write_inside() -> None:
    layer = nn.Linear(2, 2)
    version = layer.weight._version
    with parametrizing_is_no_write():
        parametrize.register_parametrization(layer, "weight", Doubled())
        original = layer.parametrizations.weight.original
        assert original._version == version
        assert torch.equal(layer.weight, 2 * original)
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert layer.weight._version == version


def test_other_data_is_a_write() -> None:
    layer = nn.Linear(2, 2)
    version, values = layer.weight._version, layer.weight.detach().clone()
    with parametrizing_is_no_write():
        parametrize.register_parametrization(layer, "weight", Stored())
    original = layer.parametrizations.weight.original
    assert original._version > version and torch.equal(original, values / 2)


def test_torch_is_as_it_was_behind_it() -> None:
    before = parametrize._maybe_set
    with pytest.raises(ValueError, match="the user's"), parametrizing_is_no_write():
        assert parametrize._maybe_set is not before
        raise ValueError("the user's")
    assert parametrize._maybe_set is before
