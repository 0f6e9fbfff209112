"""Which optimizers' updates pages cannot have, and what is known of the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.selfstepping import Traits, in_two, reasons


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes]


def found(*optimizers: Optimizer) -> tuple[dict[int, ConfigError], Traits]:
    known: Traits = {}
    return reasons(optimizers, lambda parameter: parameter.dtype, torch.device("cpu"), known), known


def test_element_wise_ones_have_traits_by_number_and_dtype() -> None:
    first, second = parameters((3,), (4,))
    second.data = second.data.double()
    refused, known = found(SGD([first], lr=0.1), Adam([first.clone().detach().requires_grad_(), second]))
    assert refused == {}
    assert set(known) == {(0, torch.float32), (1, torch.float32), (1, torch.float64)}
    assert {slot.name for slot in known[1, torch.float64].slots} == {"exp_avg", "exp_avg_sq"}
    assert {slot.dtype for slot in known[1, torch.float64].slots} == {torch.float64}
    assert not known[0, torch.float32].slots


def test_the_dtype_is_that_of_the_update_and_frozen_ones_have_none() -> None:
    trained, frozen = parameters((3,), (4,))
    frozen.requires_grad_(False)
    known: Traits = {}
    dtypes = {id(trained): torch.bfloat16, id(frozen): torch.float64}
    assert not reasons([SGD([trained, frozen])], lambda each: dtypes[id(each)], torch.device("cpu"), known)
    assert set(known) == {(0, torch.bfloat16)}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_is_refused_leaves_the_others_theirs(place: int) -> None:
    made: list[Callable[[list[nn.Parameter]], Optimizer]] = [SGD, SGD, SGD]
    made[place] = LBFGS
    refused, known = found(*(make(parameters((3,))) for make in made))
    assert set(refused) == {place} and isinstance(refused[place], ConfigError)
    assert "LBFGS" in str(refused[place])
    assert {index for index, _ in known} == {0, 1, 2} - {place}


@pytest.mark.parametrize("pair", list(itertools.combinations(range(3), 2)))
def test_those_that_share_a_parameter_are_both_refused(pair: tuple[int, int]) -> None:
    owns = [parameters((index + 2,)) for index in range(3)]
    (shared,) = parameters((7, 5))
    for index in pair:
        owns[index].append(shared)
    refused, known = found(*map(SGD, owns))
    assert set(refused) == set(pair)
    assert all("a parameter of shape (7, 5) is in two optimizers" in str(reason) for reason in refused.values())
    assert {index for index, _ in known} == set(range(3)) - set(pair)


def test_groups_of_one_optimizer_are_one() -> None:
    first, second = parameters((3,), (4,))
    refused, known = found(SGD([{"params": [first]}, {"params": [second], "lr": 1.0}]))
    assert (refused, set(known)) == ({}, {(0, torch.float32)})


def test_the_refusal_names_shape_and_remedy() -> None:
    assert str(in_two(torch.zeros(2, 9))).startswith("a parameter of shape (2, 9) is in two optimizers")
    assert "leave it in one, or keep everything in RAM, on one rank and in a true precision" in str(
        in_two(torch.zeros(1))
    )
