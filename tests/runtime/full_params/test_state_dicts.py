"""`state_dict()` while parameters are in pages: readable for the outermost call, and the modules' own again afterwards."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.autograd.recompute import replace
from lightning_ptm.runtime.full_params.state_dicts import StateDicts


class Away:
    """A model whose parameters are NaN but while somebody reads them; `asked` for which modules that was."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False)))
        self.values = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        self.asked: list[nn.Module] = []
        self.put_away()
        self.dicts = self.made(self.model.modules())

    def made(self, modules: Iterable[nn.Module], **options: Any) -> StateDicts:
        return StateDicts(modules, self.model.modules(), self.readable, self.writable, **options)

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

    @contextmanager
    def writable(self, module: nn.Module) -> Iterator[None]:
        self.asked.append(module)
        for name, each in self.model.named_parameters():
            each.data = self.values[name]
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
    away.dicts = away.made(away.model.modules())
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
    dicts = away.made([away.model[0]])
    assert [module for module in away.model.modules() if "state_dict" in vars(module)] == [away.model[0]]
    away.model.state_dict()
    assert away.asked == [away.model[0]]
    dicts.close()


def test_values_that_are_loaded_are_written_where_they_are(away: Away) -> None:
    given = {name: value + 1 for name, value in away.values.items()}
    assert str(away.model.load_state_dict(given)) == "<All keys matched successfully>"
    assert away.asked == [away.model]
    assert all(torch.equal(away.values[name], value) for name, value in given.items())
    assert all(each.isnan().all() for each in away.model.parameters())
    away.model[1].load_state_dict({"0.weight": given["1.0.weight"] + 1})
    assert away.asked == [away.model, away.model[1]]
    assert torch.equal(away.values["1.0.weight"], given["1.0.weight"] + 1)


def test_what_is_missing_or_unexpected_is_torch_s_to_say(away: Away) -> None:
    found = away.model.load_state_dict({"0.bias": torch.ones(3), "x": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["0.weight", "1.0.weight"] and found.unexpected_keys == ["x"]
    assert torch.equal(away.values["0.bias"], torch.ones(3))
    with pytest.raises(RuntimeError, match=r"Missing key.* \"0.weight\", \"1.0.weight\""):
        away.model.load_state_dict({"0.bias": torch.zeros(3)})
    assert torch.equal(away.values["0.bias"], torch.zeros(3))  # as torch does


@pytest.mark.parametrize("how", [lambda it: it({}, assign=True), lambda it: it({}, False, True)])
def test_other_parameters_cannot_be_assigned(away: Away, how: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"assign=True.*replace the parameters of the Sequential"):
        how(away.model.load_state_dict)
    assert away.asked == []


def test_nothing_is_gathered_for_what_the_run_does_itself(away: Away) -> None:
    with away.dicts.without_gathering():
        assert away.model.state_dict()["0.weight"].isnan().all()
    assert away.asked == []


COPIES = [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_the_values_and_nothing_of_ours(away: Away, copied: Callable[[Any], Any]) -> None:
    before = [{**vars(module)} for module in away.model.modules()]
    twin = copied(away.model)
    assert away.asked == [away.model]
    assert [vars(module) for module in away.model.modules()] == before
    assert all(torch.equal(each, away.values[name]) for name, each in twin.named_parameters())
    names = {"state_dict", "load_state_dict", "__deepcopy__", "__reduce_ex__", "__getstate__"}
    assert not any(names & vars(module).keys() for module in twin.modules())
    copied(twin)
    assert away.asked == [away.model]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_what_refers_to_modules(away: Away, copied: Callable[[Any], Any]) -> None:
    twin = copied({"part": away.model[1], "method": away.model[1].state_dict})
    assert twin["part"] is not away.model[1] and away.asked[0] is away.model[1]
    assert torch.equal(twin["method"]()["0.weight"], away.values["1.0.weight"])


class Chosen(nn.Linear):
    """Says itself what is copied of it."""

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        return "mine"


class Slotted(nn.Linear):
    __slots__ = ("extra",)

    def __getstate__(self) -> Any:
        return {**self.__dict__}, {"extra": self.extra}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0])
        self.extra = state[1]["extra"]


def test_classes_that_say_themselves_what_a_copy_is(away: Away) -> None:
    away.dicts.close()
    away.model.append(Chosen(1, 1))
    away.model.append(Slotted(1, 1))
    away.model[3].extra = 5
    away.values = {name: each.detach().clone().zero_() for name, each in away.model.named_parameters()}
    away.dicts = away.made(away.model.modules())
    twin = copy.deepcopy(away.model)
    assert vars(twin)["_modules"]["2"] == "mine" and twin[3].extra == 5
    assert not twin[3].weight.isnan().any() and "state_dict" not in vars(twin[3])


@pytest.mark.parametrize("copied", COPIES)
def test_a_class_that_copies_all_attributes_of_a_module(away: Away, copied: Callable[[Any], Any]) -> None:
    away.dicts.close()
    away.model.append(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1))))
    away.values = {name: each.detach().clone() for name, each in away.model.named_parameters()}
    away.put_away()
    away.dicts = away.made(away.model.modules())
    restore = replace(away.model[2], forward=partial(print, threading.Lock()))
    before = [{**vars(module)} for module in away.model.modules()]
    for twin in (copied(away.model)[2], copied(away.model[2])):
        assert torch.equal(twin(torch.ones(1)), away.values["2.0.weight"][0] + away.values["2.0.bias"])
        assert not {"forward", "state_dict", "__deepcopy__", "__getstate__"} & vars(twin).keys()
    assert [vars(module) for module in away.model.modules()] == before
    restore()


@pytest.mark.parametrize("copied", COPIES)
def test_copies_that_would_be_wrong_are_refused(away: Away, copied: Callable[[Any], Any]) -> None:
    away.dicts.close()
    away.dicts = away.made(away.model.modules(), uncopied="not now")
    with pytest.raises(UsageError, match="not now"):
        copied(away.model)
    assert away.asked == []
