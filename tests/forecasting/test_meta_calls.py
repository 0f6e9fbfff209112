"""Calls that are not made again are told and answered as if they were; and which are made each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptm.forecasting.meta_calls import Call, MetaCalls


class Made(TorchDispatchMode):
    """Counts what is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def convolution(x: Tensor) -> list[Tensor]:
    layer = nn.Conv2d(4, 6, 3, device="meta")
    images = x.view(8, 4, 4, 4)
    return [layer(images), layer(images.to(memory_format=torch.channels_last)), F.max_pool2d(images, 2)]


def attention(x: Tensor) -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, device="meta")
    return [layer(x[None]), layer(x[None].transpose(0, 1))]


def numbers(x: Tensor) -> list[Tensor]:
    """Equal ones of different kinds give different dtypes."""
    whole = torch.ones(3, dtype=torch.int64, device="meta")
    return [
        whole * 1,
        whole * 1.0,
        whole * True,
        whole.bool() * True,
        whole.bool() * 1,
        whole.sum(0),
        whole.sum(0, True),
    ]


def layouts(x: Tensor) -> list[Tensor]:
    return [x.relu(), x.t().relu(), x[:, ::2].relu(), x[:1].expand(8, -1).relu(), x[:1].expand(8, -1).contiguous()]


def several_results(x: Tensor) -> list[Tensor]:
    return [*x.topk(3), *x.split(3), *torch.aminmax(x), torch.cat([x, x]), torch.cat([x, x], 1), *x.sort()]


def dtypes(x: Tensor) -> list[Tensor]:
    return [
        x.to(torch.bfloat16),
        x.to(torch.float64),
        x.softmax(0),
        x.bfloat16().softmax(0),
        F.gelu(x),
        x.exp(),
        x.sum(),
    ]


def written_to(x: Tensor) -> list[Tensor]:
    y = x.clone()
    return [y.mul_(2), y.add_(y), torch.empty_like(x).bernoulli_(0.5), y.zero_().exp()]


CASES = [convolution, attention, numbers, layouts, several_results, dtypes, written_to]


def told_and_returned(
    compute: Callable[[Tensor], list[Tensor]], *, remembers: bool, times: int = 3
) -> tuple[list[Call], list[Any]]:
    told: list[Call] = []
    returned: list[Any] = []
    calls = MetaCalls(told.append)
    for _ in range(times):
        with calls if remembers else MetaCalls(told.append):
            results = compute(torch.ones(8, 64, device="meta"))
        returned += [(each.shape, each.stride(), each.dtype, each.untyped_storage().nbytes()) for each in results]
    return told, returned


@pytest.mark.parametrize("compute", CASES)
def test_what_is_remembered_is_what_would_be(compute: Callable[[Tensor], list[Tensor]]) -> None:
    again = told_and_returned(compute, remembers=True)
    assert again == told_and_returned(compute, remembers=False)
    assert again[0] and any(call.moved_bytes for call in again[0])


def test_a_call_like_an_earlier_one_is_not_made() -> None:
    x, other = torch.ones(4, 8, device="meta"), torch.ones(4, 8, dtype=torch.bfloat16, device="meta")
    told: list[Call] = []
    with Made() as made, MetaCalls(told.append):
        for _ in range(5):
            x.exp(), other.exp(), torch.mm(x, x.t())
    assert made.count["exp"] == 2 and made.count["mm"] == 1 and made.count["t"] == 5
    exps = [call for call in told if call.curved_numel]
    assert exps == 5 * [Call(0, 2 * 4 * 8 * 4, 32), Call(0, 2 * 4 * 8 * 2, 32)]
    assert [call.flops for call in told if call.flops] == 5 * [2 * 4 * 8 * 4]


def test_each_result_is_a_tensor_of_its_own() -> None:
    x = torch.ones(4, device="meta", requires_grad=True)
    with MetaCalls(lambda call: None):
        first, second = x.exp(), x.exp()
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert first.grad_fn is not None and second.grad_fn is not None


def test_what_depends_on_values_is_made_each_time() -> None:
    told: list[Call] = []
    with MetaCalls(told.append):
        results = [torch.tensor([1.0, 2.0]) * factor for factor in (1, 2, 2)]
        drawn = [torch.rand(3) for _ in range(2)]
    assert [each.tolist() for each in results] == [[1, 2], [2, 4], [2, 4]]
    assert not torch.equal(*drawn) and all(each.device.type == "cpu" for each in drawn)
