"""Changes of a model that count as other parameters, and tensors of a module that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from lightning_ptm.runtime.units.module_parameters import KnownParameters, overlap


def model() -> Any:
    built = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(2, 2))
    built[2].weight = built[0].weight
    return built


def put(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


CHANGES: dict[str, Callable[[Any], object]] = {
    "replaced": lambda built: put(built[1], "weight", nn.Parameter(torch.ones(2, 2))),
    "added": lambda built: put(built, "more", nn.Parameter(torch.ones(2))),
    "removed": lambda built: put(built[1], "bias", None),
    "a module more": lambda built: built.append(nn.Linear(2, 2)),
    "a module less": lambda built: built.pop(1),
    "tied": lambda built: put(built[1], "weight", built[0].weight),
    "untied": lambda built: put(built[2], "weight", nn.Parameter(torch.ones(2, 2))),
    "parametrized": lambda built: parametrize.register_parametrization(built[1], "weight", nn.Identity()),
}

SAME: dict[str, Callable[[Any], object]] = {
    "nothing": lambda built: None,
    "pruned": lambda built: prune.l1_unstructured(built[1], "weight", 1),
    "frozen": lambda built: built.requires_grad_(False),
    "written to": lambda built: built[1].weight.data.mul_(2),
    "a module without parameters": lambda built: built.append(nn.Tanh()),
    "in another order": lambda built: built.append(built.pop(0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_parameters(name: str) -> None:
    built = model()
    known = KnownParameters(built)
    assert not known.changed()
    CHANGES[name](built)
    assert known.changed()


@pytest.mark.parametrize("name", SAME)
def test_the_same_ones(name: str) -> None:
    built = model()
    known = KnownParameters(built)
    SAME[name](built)
    assert not known.changed()


def test_what_optimizers_have_and_no_module() -> None:
    built, other = model(), nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.SGD(built.parameters()), torch.optim.SGD([built[1].bias, other])]
    (found,) = KnownParameters(built, optimizers).outside_module
    assert found is other


def holder(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, each in tensors.items():
        module.register_parameter(name, each if isinstance(each, nn.Parameter) else nn.Parameter(each))
    return module


ROWS = torch.zeros(8, 4)


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: holder(a=ROWS[:4], b=ROWS[4:]), None),
        (lambda: holder(a=ROWS[:5], b=ROWS[4:]), ("a", "b")),
        (lambda: holder(b=ROWS[4:], a=ROWS[:5]), ("a", "b")),
        (lambda: holder(a=ROWS, c=torch.zeros(2), b=ROWS[6:7]), ("a", "b")),
        (lambda: holder(a=ROWS.t(), b=ROWS[7:]), ("a", "b")),
        (lambda: holder(a=torch.empty(0), b=torch.empty(0)), None),
        (lambda: holder(a=torch.empty(4, device="meta"), b=torch.empty(4, device="meta")), None),
        (lambda: holder(a=(one := nn.Parameter(torch.zeros(3))), b=one), None),
    ],
)
def test_which_share_memory(build: Callable[[], nn.Module], found: tuple[str, str] | None) -> None:
    module = build()
    assert overlap(module, module.parameters()) == found
    assert overlap(module, ()) is None
