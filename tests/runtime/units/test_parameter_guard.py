"""When parameters can be read: by whether they are used, and where their values are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.plain_loop import fit, tokens
from kit.stacks import Stack
from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.units import parameter_guard as module
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter, ParameterGuard, guarded_class, reopen


class Own(nn.Parameter):
    """A class of somebody's own."""


def made(*, closes: bool) -> tuple[ParameterGuard, list[nn.Parameter]]:
    def refusal(given: tuple[Any, ...]) -> Exception:
        return KeyError(f"{len(given)} given")

    parameters: list[nn.Parameter] = [nn.Parameter(torch.ones(2)), Own(torch.ones(2))]
    return ParameterGuard(parameters, refusal, closes=closes), parameters


def is_open(parameters: list[nn.Parameter]) -> bool:
    found = {not isinstance(each, GuardedParameter) for each in parameters}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(("bound", "summoned"), [(True, False), (False, False), (True, True), (False, True)])
def test_they_can_be_read_where_they_are_lent_or_there_and_used(
    closes: bool, used: bool, bound: bool, summoned: bool
) -> None:
    parameter_guard, parameters = made(closes=closes)
    for _ in range(2):  # the order does not matter
        parameter_guard.open() if used else parameter_guard.close()
        parameter_guard.values_are(bound=bound, summoned=summoned)
    expected = summoned or (bound and (used or not closes))
    assert is_open(parameters) is expected
    parameter_guard.close() if used else parameter_guard.open()
    assert is_open(parameters) is (summoned or (bound and (not used or not closes)))


def test_they_are_of_their_own_classes_when_they_are_open_and_refuse_when_not() -> None:
    parameter_guard, parameters = made(closes=True)
    parameter_guard.values_are(bound=False, summoned=False)
    with pytest.raises(KeyError, match="2 given"):
        parameters[0] + 1
    assert isinstance(parameters[1], Own)
    parameter_guard.values_are(bound=False, summoned=True)
    assert [type(each) for each in parameters] == [nn.Parameter, Own] and parameters[0].sum() == 2


def test_those_that_an_earlier_run_has_left_closed_open_to_their_own_class() -> None:
    first, parameters = made(closes=False)
    first.values_are(bound=False, summoned=False)
    second = ParameterGuard(parameters, lambda given: KeyError("second"), closes=False)
    with pytest.raises(KeyError, match="given"):
        parameters[0].sum()
    second.open_for_good(1)
    assert type(parameters[1]) is Own and isinstance(parameters[0], GuardedParameter)
    second.values_are(bound=True, summoned=False)
    assert type(parameters[0]) is nn.Parameter


def test_others_may_take_their_place() -> None:
    parameter_guard, parameters = made(closes=True)
    parameter_guard.values_are(bound=True, summoned=False)
    parameters[0] = nn.Parameter(torch.ones(3))
    parameter_guard.open()
    parameter_guard.close()
    assert not is_open(parameters)


def test_at_the_end_of_a_run_they_stay_as_they_are() -> None:
    parameter_guard, parameters = made(closes=True)
    parameter_guard.values_are(bound=True, summoned=False)
    parameter_guard.open()
    parameter_guard.forget()
    assert is_open(parameters)
    parameter_guard.close()
    parameter_guard.open()
    assert not is_open(parameters)  # there is no flat any more


class Special(nn.Parameter):
    pass


def closed(kind: type[nn.Parameter] = nn.Parameter) -> Any:
    parameter: Any = kind(torch.arange(6.0).view(2, 3))
    parameter.__class__ = guarded_class(kind, lambda given: UsageError(f"refused {len(given)}"))
    return parameter


VALUES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "add": lambda p: p + 1,
    "radd": lambda p: torch.ones(2, 3) + p,
    "index": lambda p: p[0],
    "write": lambda p: p.data.zero_(),
    "replace": lambda p: setattr(p, "data", torch.ones(2, 3)),
    "set item": lambda p: p.__setitem__(0, 1.0),
    "T": lambda p: p.T,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "item": lambda p: p.max().item(),
    "in a list": lambda p: torch.stack([p, p]),
    "by keyword": lambda p: torch.nn.functional.linear(torch.ones(3), weight=p),
    "address": lambda p: p.data_ptr(),
}

FACTS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: tuple(p.shape),
    "size": lambda p: p.size(0),
    "len": len,
    "numel": lambda p: (p.numel(), torch.numel(p)),
    "dtype": lambda p: (p.dtype, p.device, p.requires_grad, p.is_leaf),
    "stride": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset()),
    "floating": lambda p: (p.is_floating_point(), torch.is_complex(p)),
    "like": lambda p: torch.zeros_like(p).tolist(),
    "new": lambda p: p.new_ones(2).tolist(),
    "grad": lambda p: p.grad,
}


@pytest.mark.parametrize("ask", VALUES)
def test_values_are_refused(ask: str) -> None:
    parameter = closed()
    with pytest.raises(UsageError, match="refused"):
        VALUES[ask](parameter)
    assert reopen(parameter) and parameter.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize("ask", FACTS)
def test_facts_are_told(ask: str) -> None:
    parameter = closed()
    told = FACTS[ask](parameter)
    reopen(parameter)
    assert told == FACTS[ask](parameter)


def test_it_is_the_same_object_of_its_own_class() -> None:
    parameter = closed(Special)
    parameter.mine = 1
    parameter.grad = torch.ones(2, 3)
    assert isinstance(parameter, Special) and isinstance(parameter, GuardedParameter)
    assert parameter in {parameter} and "values that cannot be read now" in repr(parameter)
    assert reopen(parameter) and not reopen(parameter)
    assert type(parameter) is Special and parameter.mine == 1 and parameter.grad.sum() == 6


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(take: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match="cannot be copied or pickled while a run is in progress"):
        take(closed())


def test_a_step_asks_closed_parameters_little(strategy_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question goes through Python: a step's own are asked of the tensors behind."""
    asked = []

    def noting(function: Any, known: Callable[[Any], bool] = module.is_about_values) -> bool:
        asked.append(function)
        return known(function)

    def questions(steps: int) -> int:
        asked.clear()
        fit(Stack, tokens(steps), strategy_at("ram"))
        return len(asked)

    monkeypatch.setattr(module, "is_about_values", noting)
    # zero_grad of torch's optimizers looks at each parameter once.
    assert 0 < questions(4) - questions(2) <= 2 * len(list(Stack().parameters()))
