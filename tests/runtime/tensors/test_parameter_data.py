"""A parameter that gets memory on another device stays the object that it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_ptm.runtime.tensors.parameter_data import set_data


def test_a_parameter_stays_itself_where_torch_refuses_it_another_device() -> None:
    """As to devices of other libraries, here to `meta` and back: Module.to would make another object without hooks."""
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.empty(3, device="meta")
    seen: list[str] = []
    parameter.register_hook(lambda gradient: seen.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("later hook"))
    parameter.grad = torch.ones(3)

    assert set_data(parameter, torch.empty(3, device="meta")) is None
    assert type(parameter) is nn.Parameter
    assert parameter.is_meta
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.grad.is_meta
    parameter.grad = None
    base = torch.full((5,), 2.0)
    set_data(parameter, base[1:4])
    base.add_(1)  # of which its own count of writes knows nothing
    version = parameter._version
    parameter.mul(parameter).sum().backward()
    assert seen == ["hook", "later hook"]
    assert parameter.grad.tolist() == [6.0] * 3
    base.add_(1)
    assert parameter._version == version

    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    set_data(frozen, torch.empty(3, device="meta"))
    assert not frozen.requires_grad
    with pytest.raises(RuntimeError, match="type"):
        set_data(nn.Parameter(torch.ones(3)), torch.ones(3, dtype=torch.int64))
