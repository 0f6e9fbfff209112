"""Optimizers that cannot update pages, and the traits of the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec
from lightning_ptm.runtime.deciding.unpaged_optimizers import Traits, check_shared, reasons


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


CPU = torch.device("cpu")


def found(*optimizers: Optimizer) -> tuple[dict[int, ConfigError], Traits]:
    known: Traits = {}
    return reasons(optimizers, lambda parameter: parameter.dtype, CPU, known), known


def test_element_wise_ones_have_traits_by_number_and_dtype() -> None:
    first, second = parameters((3,), (4,))
    second.data = second.data.double()
    refused, known = found(SGD([first], lr=0.1), Adam([first.clone().detach().requires_grad_(), second]))
    assert refused == {}
    assert set(known) == {(0, torch.float32, CPU), (1, torch.float32, CPU), (1, torch.float64, CPU)}
    assert {slot.name for slot in known[1, torch.float64, CPU].slots} == {"exp_avg", "exp_avg_sq"}
    assert {slot.dtype for slot in known[1, torch.float64, CPU].slots} == {torch.float64}
    assert not known[0, torch.float32, CPU].slots


def test_the_dtype_is_that_of_the_update_and_frozen_ones_have_none() -> None:
    trained, frozen = parameters((3,), (4,))
    frozen.requires_grad_(False)
    known: Traits = {}
    dtypes = {id(trained): torch.bfloat16, id(frozen): torch.float64}
    assert not reasons([SGD([trained, frozen])], lambda each: dtypes[id(each)], CPU, known)
    assert set(known) == {(0, torch.bfloat16, CPU)}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_is_refused_leaves_the_others_theirs(place: int) -> None:
    made: list[Callable[[list[nn.Parameter]], Optimizer]] = [SGD, SGD, SGD]
    made[place] = LBFGS
    refused, known = found(*(make(parameters((3,))) for make in made))
    assert set(refused) == {place} and isinstance(refused[place], ConfigError)
    assert "LBFGS" in str(refused[place])
    assert {index for index, *_ in known} == {0, 1, 2} - {place}


def test_those_that_share_a_parameter_have_one_update_each() -> None:
    (shared,) = parameters((7, 5))
    refused, known = found(SGD([shared]), Adam([*parameters((3,)), shared]))
    assert (refused, set(known)) == ({}, {(0, torch.float32, CPU), (1, torch.float32, CPU)})


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_who_shares_with_one_that_steps_itself_does_so_too(order: tuple[int, ...]) -> None:
    first, second, other = parameters((3,), (4,), (5,))
    made = [LBFGS([first]), SGD([first, second]), Adam([second]), Adam([other])]
    refused, _ = found(*(made[place] for place in order))
    assert {order[place] for place in refused} == {0, 1, 2}
    assert all("LBFGS" in str(reason) for reason in refused.values())


def test_one_that_updates_a_shared_parameter_as_a_whole_is_refused() -> None:
    (shared,) = parameters((7, 5))
    refused, _ = found(SGD([shared]), Adafactor([shared]), SGD(parameters((2,))))
    assert set(refused) == {0, 1}
    for reason in map(str, refused.values()):
        assert "a parameter of shape (7, 5) is in two optimizers, of which torch.optim" in reason
        assert "leave it in one, use element-wise optimizers" in reason


def test_groups_of_one_optimizer_are_one() -> None:
    first, second = parameters((3,), (4,))
    refused, known = found(SGD([{"params": [first]}, {"params": [second], "lr": 1.0}]))
    assert (refused, set(known)) == ({}, {(0, torch.float32, CPU)})


def specs(*further: tuple[int, int], trainable: bool = True) -> list[UnitSpec]:
    return [UnitSpec("", (ParameterSpec("trunk", (3,), "float32", 4, trainable, 0, 0, further),))]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"lock_free": True, "scaled": False},
            "trunk is in two optimizers, and with lock_free=True .* use lock_free=False",
        ),
        (
            {"lock_free": False, "scaled": True},
            "trunk is in two optimizers, and with precision='16-mixed' .*='bf16-mixed'",
        ),
    ],
)
def test_what_shared_parameters_cannot_be_with(asked: dict[str, bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_shared(specs((1, 0)), **asked)
    check_shared(specs(), **asked)
    check_shared(specs((1, 0), trainable=False), **asked)
    check_shared(specs((1, 0)), lock_free=False, scaled=False)
