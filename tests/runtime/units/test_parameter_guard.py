"""When parameters can be read: by whether they are used, and where their values are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_ptm.runtime.units.guarded_parameter import GuardedParameter
from lightning_ptm.runtime.units.parameter_guard import ParameterGuard


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
@pytest.mark.parametrize(("bound", "lent"), [(True, False), (False, False), (True, True), (False, True)])
def test_they_can_be_read_where_they_are_lent_or_there_and_used(
    closes: bool, used: bool, bound: bool, lent: bool
) -> None:
    parameter_guard, parameters = made(closes=closes)
    for _ in range(2):  # the order does not matter
        parameter_guard.open() if used else parameter_guard.close()
        parameter_guard.values_are(bound=bound, lent=lent)
    expected = lent or (bound and (used or not closes))
    assert is_open(parameters) is expected
    parameter_guard.close() if used else parameter_guard.open()
    assert is_open(parameters) is (lent or (bound and (not used or not closes)))


def test_they_are_of_their_own_classes_when_they_are_open_and_refuse_when_not() -> None:
    parameter_guard, parameters = made(closes=True)
    parameter_guard.values_are(bound=False, lent=False)
    with pytest.raises(KeyError, match="2 given"):
        parameters[0] + 1
    assert isinstance(parameters[1], Own)
    parameter_guard.values_are(bound=False, lent=True)
    assert [type(each) for each in parameters] == [nn.Parameter, Own] and parameters[0].sum() == 2


def test_those_that_an_earlier_run_has_left_closed_open_to_their_own_class() -> None:
    first, parameters = made(closes=False)
    first.values_are(bound=False, lent=False)
    second = ParameterGuard(parameters, lambda given: KeyError("second"), closes=False)
    with pytest.raises(KeyError, match="given"):
        parameters[0].sum()
    second.open_for_good(1)
    assert type(parameters[1]) is Own and isinstance(parameters[0], GuardedParameter)
    second.values_are(bound=True, lent=False)
    assert type(parameters[0]) is nn.Parameter


def test_others_may_take_their_place() -> None:
    parameter_guard, parameters = made(closes=True)
    parameter_guard.values_are(bound=True, lent=False)
    parameters[0] = nn.Parameter(torch.ones(3))
    parameter_guard.open()
    parameter_guard.close()
    assert not is_open(parameters)


def test_at_the_end_of_a_run_they_stay_as_they_are() -> None:
    parameter_guard, parameters = made(closes=True)
    parameter_guard.values_are(bound=True, lent=False)
    parameter_guard.open()
    parameter_guard.forget()
    assert is_open(parameters)
    parameter_guard.close()
    parameter_guard.open()
    assert not is_open(parameters)  # there is no flat any more
