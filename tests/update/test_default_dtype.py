"""Functions that make tensors, in a thread beside a forward that has changed torch's default dtype."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_ptm.update.default_dtype import DefaultDtype

MADE: dict[str, Callable[[], Tensor]] = {
    "zeros": lambda: torch.zeros(2, 3),
    "ones": lambda: torch.ones(()),
    "empty": lambda: torch.empty(3).fill_(0.1),
    "empty_strided": lambda: torch.empty_strided((2,), (1,)).fill_(0.1),
    "eye": lambda: torch.eye(2),
    "rand": lambda: torch.rand(3, generator=torch.Generator().manual_seed(1)),
    "randn": lambda: torch.randn(3, generator=torch.Generator().manual_seed(1)),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "logspace": lambda: torch.logspace(0, 1, 7),
    "scalar_tensor": lambda: torch.scalar_tensor(0.1),
    "tensor of a float": lambda: torch.tensor(0.9),
    "tensor of floats and integers": lambda: torch.tensor([[1, 0.1], [2, 3]]),
    "tensor of floats, by name": lambda: torch.tensor(data=(0.1, 0.2)),
    "tensor of nothing": lambda: torch.tensor([]),
    "tensor of an integer": lambda: torch.tensor(3),
    "tensor of truths": lambda: torch.tensor([True]),
    "tensor of NumPy's": lambda: torch.tensor(np.float64(0.1)),
    "tensor of an array": lambda: torch.tensor(np.full(2, 0.1)),
    "tensor of its own dtype": lambda: torch.tensor(0.1, dtype=torch.float16),
    "as_tensor of a float": lambda: torch.as_tensor(0.1),
    "as_tensor of a tensor": lambda: torch.as_tensor(torch.full((2,), 0.1, dtype=torch.float64)),
    "asarray of a float": lambda: torch.asarray([0.1]),
    "full of a float": lambda: torch.full((2,), 0.1),
    "full of an integer": lambda: torch.full((), 1),
    "full, by name": lambda: torch.full(size=(2,), fill_value=0.1),
    "arange of a float": lambda: torch.arange(0, 1, 0.3),
    "arange of integers": lambda: torch.arange(3),
    "zeros_like": lambda: torch.zeros_like(torch.zeros(2, dtype=torch.float16)),
    "new_ones": lambda: torch.zeros(2, dtype=torch.float64).new_ones(3),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def other(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_what_it_would_be_with_that_default(name: str, other: torch.dtype) -> None:
    torch.set_default_dtype(torch.float32)
    expected = MADE[name]()
    torch.set_default_dtype(other)
    with DefaultDtype(torch.float32):
        made = MADE[name]()
    assert made.dtype is expected.dtype
    torch.testing.assert_close(made, expected, rtol=0, atol=0)


def test_other_threads_have_the_default(other: torch.dtype) -> None:
    made: list[torch.dtype] = []
    with DefaultDtype(torch.float32):
        thread = threading.Thread(target=lambda: made.append(torch.zeros(1).dtype))
        thread.start()
        thread.join()
    assert made == [other] and torch.zeros(1).dtype is other
