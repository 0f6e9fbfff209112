"""A module whose parameters end anywhere, in pages anywhere, without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decided_by_hand import LaidOut, Net, adam, decided, laid_out
from torch import Tensor, nn

PLACES: dict[str, dict[str, Any]] = {
    "ram": {},
    "host": {"device_memory": "4MiB", "offload_parameters": "host", "offload_optimizer": "host"},
    "masters on disk": {"offload_optimizer": "disk", "disk_path": "/d"},
    "all on disk": {"offload_parameters": "disk", "offload_optimizer": "disk", "disk_path": "/d"},
}
MIXED = {"compute": torch.bfloat16, "mixed": True}


class Odd(Net):
    """Model with parameters that do not end with pages, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__(2)
        self.bias = nn.Parameter(torch.randn(77))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)


@contextmanager
def run_of(module: nn.Module, disk: Path, place: str = "ram", **options: Any) -> Iterator[LaidOut]:
    found = decided(
        module, lambda parameters: adam([each for each in parameters if each.requires_grad]), **PLACES[place], **options
    )
    with laid_out(found, [disk]) as made:
        yield made


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def values_of(made: LaidOut) -> dict[str, Tensor]:
    return {name: value.clone() for name, _, value in made.values.parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].dtype is value.dtype, name


def ids(module: nn.Module, values: dict[str, Tensor]) -> dict[int, Tensor]:
    return {id(dict(module.named_parameters())[name]): value for name, value in values.items()}


def states_for(module: nn.Module, *names: str) -> dict[int, dict[str, Any]]:
    parameters = dict(module.named_parameters())
    return {
        id(parameters[name]): {
            "step": torch.tensor(float(len(name))),
            "exp_avg": torch.randn(parameters[name].shape),
            "exp_avg_sq": torch.rand(parameters[name].shape),
        }
        for name in names
    }
