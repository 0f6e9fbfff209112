"""`state_dict()` while parameters are in pages: readable for the outermost call, and the modules' own again afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.state_dicts import StateDicts


class Away:
    """A model whose parameters are NaN but while somebody reads them; `asked` for which modules that was."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False)))
        self.values = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.asked: list[nn.Module] = []
        self.put_away()
        self.dicts = StateDicts(self.model.modules(), self.readable)

    def put_away(self) -> None:
        for each in self.model.parameters():
            each.data = torch.full((), torch.nan).expand(each.shape)

    @contextmanager
    def readable(self, module: nn.Module) -> Iterator[None]:
        self.asked.append(module)
        for name, each in self.model.named_parameters():
            each.data = self.values[name].clone()
        try:
            yield
        finally:
            self.put_away()


@pytest.fixture
def away() -> Iterator[Away]:
    made = Away()
    yield made
    made.dicts.close()


def test_the_outermost_call_reads_and_its_values_stay(away: Away) -> None:
    found = away.model.state_dict()
    assert away.asked == [away.model]
    assert found.keys() == away.values.keys()
    assert all(torch.equal(found[name], value) for name, value in away.values.items())
    assert all(each.isnan().all() for each in away.model.parameters())


def test_a_part_is_asked_for_alone_and_each_call_anew(away: Away) -> None:
    part = away.model[1]
    for times in (1, 2):
        found = part.state_dict(prefix="x.")
        assert torch.equal(found["x.0.weight"], away.values["1.0.weight"])
        assert away.asked == times * [part]


@pytest.mark.filterwarnings("ignore:Positional args")
@pytest.mark.parametrize("call", [lambda it: it.state_dict(keep_vars=True), lambda it: it.state_dict({}, "", True)])
def test_who_wants_the_parameters_themselves_has_them_and_nothing_is_gathered(
    away: Away, call: Callable[[nn.Module], dict[str, Any]]
) -> None:
    found = call(away.model)
    assert away.asked == []
    assert all(found[name] is each for name, each in away.model.named_parameters())


@pytest.mark.filterwarnings("ignore:Positional args")
@pytest.mark.parametrize("call", [lambda it: it.state_dict(keep_vars=False), lambda it: it.state_dict({}, "a.", False)])
def test_asked_in_other_ways(away: Away, call: Callable[[nn.Module], dict[str, Any]]) -> None:
    assert not any(value.isnan().any() for value in call(away.model).values())
    assert away.asked == [away.model]


def test_a_call_that_fails_leaves_nothing_open(away: Away) -> None:
    away.dicts.close()
    own = away.model[1].state_dict

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("mine")

    away.model[1].state_dict = fails
    away.dicts = StateDicts(away.model.modules(), away.readable)
    with pytest.raises(ValueError, match="mine"):
        away.model.state_dict()
    assert all(each.isnan().all() for each in away.model.parameters())
    assert not away.model[0].state_dict()["weight"].isnan().any()
    assert away.asked == [away.model, away.model[0]]
    away.dicts.close()
    assert away.model[1].state_dict is fails
    away.model[1].state_dict = own


def test_the_modules_have_their_own_back() -> None:
    away = Away()
    away.dicts.close()
    away.dicts.close()
    assert away.model.state_dict()["0.weight"].isnan().all() and away.asked == []
    assert all("state_dict" not in vars(module) for module in away.model.modules())
    copy.deepcopy(away.model)


def test_only_given_modules_are_changed() -> None:
    away = Away()
    away.dicts.close()
    dicts = StateDicts([away.model[0]], away.readable)
    assert [module for module in away.model.modules() if "state_dict" in vars(module)] == [away.model[0]]
    away.model.state_dict()
    assert away.asked == [away.model[0]]
    dicts.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_in_a_run_are_refused(away: Away, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError):
        copied(away.model.state_dict)
