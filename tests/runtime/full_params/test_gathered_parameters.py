"""Parameters in the user's hands, on one rank, wherever the pages are. Several ranks: tests/ranks.

Weights in the user's hands, of an engine that is driven by hand.

Which parameters runs have trained: known by module and attribute, for as long as the module lives.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from decided_by_hand import PAGE, Net
from engine_by_hand import (
    HOMES,
    run,
)
from torch import nn
from values_by_hand import MIXED, PLACES, Odd, assert_equal, copies, ids, run_of, values_of

from lightning_ptm.errors import CapacityError, UsageError
from lightning_ptm.runtime.full_params import gathered_parameters
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("write", [False, True])
def test_edits_are_kept_where_they_are_to_be(disk: Path, place: str, write: bool) -> None:
    module = Odd()
    before = copies(module)
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over(keep_frozen=True)
        with made.gathered_parameters.gathered({0, 2}, write=write):
            assert torch.equal(module.head, before["head"])
            assert isinstance(module.blocks[0].weight, GuardedParameter)  # nobody asked for it
            with torch.no_grad():
                module.head[3] = 5.0
                module.blocks[1].weight.data = torch.ones(2, PAGE // 4)  # replaces the view
                module.frozen.zero_()
        expected = before
        if write:
            expected["head"][3] = 5.0
            expected["blocks.1.weight"] = torch.ones(2, PAGE // 4)
            expected["frozen"] = torch.zeros(9)
        assert_equal(values_of(made), expected)
        made.gathered_parameters.check_written()


def test_edits_are_dropped_where_a_rank_is_gone(disk: Path) -> None:
    module = Odd()
    before = copies(module)
    with run_of(module, disk) as made:
        made.take_over()
        with made.gathered_parameters.gathered({0}, write=True, may_write=lambda: False), torch.no_grad():
            module.head.zero_()
        assert_equal(values_of(made), before)


def test_blocks_may_be_nested(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "host") as made:
        made.take_over()
        with made.gathered_parameters.gathered({0}, write=True), torch.no_grad():
            module.head[0] = 5.0
            with made.gathered_parameters.gathered({0, 1}, write=False):
                assert module.head[0] == 5.0
                module.head[1] = 6.0
                module.blocks[0].weight.zero_()
            assert module.head[1] == 6.0
        assert values_of(made)["head"][:2].tolist() == [5.0, 6.0]
        assert values_of(made)["blocks.0.weight"].any()
        with made.gathered_parameters.gathered({0}, write=True):
            pass
        with made.gathered_parameters.gathered({0}, write=False):
            with (
                pytest.raises(
                    UsageError, match=r"gathered\(write=True\) inside of .*: edits of the root would be lost"
                ),
                made.gathered_parameters.gathered({0, 1}, write=True),
            ):
                pass
            with made.gathered_parameters.gathered({1}, write=True), torch.no_grad():
                module.blocks[0].weight.zero_()
        assert not values_of(made)["blocks.0.weight"].any()
        with made.gathered_parameters.gathered({0}, write=True):
            pass


def test_a_block_that_fails_keeps_its_edits_and_ends(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "host") as made:
        made.take_over()
        with (
            pytest.raises(ValueError, match="mine"),
            made.gathered_parameters.gathered({0}, write=True),
            torch.no_grad(),
        ):
            module.head.zero_()
            raise ValueError("mine")
        assert not any(store.summoned for store in made.stores)
        assert not values_of(made)["head"].any()


def test_ram_that_is_lent(disk: Path) -> None:
    module = Net(2)
    with run_of(module, disk, "host") as made:
        made.take_over()
        assert made.gathered_parameters.bytes_to_gather(()) == 0
        assert made.gathered_parameters.bytes_to_gather({1}) == 2 * PAGE
        assert made.gathered_parameters.bytes_to_gather({0, 1, 2}) == (1 + 1 + 2 + 2) * PAGE
        with made.gathered_parameters.gathered({2}, write=False):
            assert made.gathered_parameters.bytes_to_gather({0, 1, 2}) == (1 + 1 + 1) * PAGE


def test_values_are_lent_for_a_checkpoint(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "host") as made:
        made.take_over()
        given = {name: torch.randn(value.shape) for name, value in values_of(made).items()}
        with made.gathered_parameters.substituted(ids(module, given)):
            assert_equal(copies(module), given)
        with made.gathered_parameters.substituted(None):
            assert all(each.isnan().all() for each in module.parameters())
        assert all(isinstance(each, GuardedParameter) for each in module.parameters())
        with (
            made.gathered_parameters.gathered({1}, write=False),
            pytest.raises(UsageError, match="a checkpoint cannot be saved inside"),
            made.gathered_parameters.substituted(None),
        ):
            pass


@pytest.mark.parametrize("home", HOMES)
def test_edits_of_gathered_weights_are_trained_on(disk: Path, home: str) -> None:
    with run(disk, **HOMES[home]) as it:
        with it.engine.summon.gathered([it.module.blocks[0]]):
            it.module.blocks[0].weight.data.fill_(7.0)
        assert it.weights() == [0.5, 7.0, 3.0]
        it.train()
        assert it.weights()[1] != 7.0


def test_what_ram_cannot_hold_whole_is_not_gathered(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(disk, **HOMES["all on disk"]) as it:
        monkeypatch.setattr(gathered_parameters, "free_host_bytes", lambda: 0)
        refused = pytest.raises(CapacityError, match=r"the full weights of Chain take .* of RAM")
        with refused, it.engine.summon.gathered([it.module]):
            pass


def test_what_a_run_has_trained_is_known_behind_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert gathered_parameters.trained_in(model) == frozenset()
    gathered_parameters.note(model, {id(model[0].weight)})
    gathered_parameters.note(model, {id(model[1].bias)})
    assert gathered_parameters.trained_in(model) == {id(model[0].weight), id(model[1].bias)}
    assert gathered_parameters.trained_in(model[1]) == {id(model[1].bias)}


def test_another_parameter_in_its_place_counts_as_trained() -> None:
    layer = nn.Linear(2, 2)
    gathered_parameters.note(layer, {id(layer.weight)})
    layer.weight = nn.Parameter(torch.zeros(3, 2))
    assert gathered_parameters.trained_in(layer) == {id(layer.weight)}
    del layer.weight
    assert id(layer.bias) not in gathered_parameters.trained_in(layer)


def test_tied_parameters_are_known_in_every_module() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    gathered_parameters.note(nn.ModuleList([one, two]), {id(one.weight)})
    assert gathered_parameters.trained_in(two) == {id(one.weight)}


def test_a_module_that_is_gone_is_forgotten() -> None:
    layer = nn.Linear(2, 2)
    gathered_parameters.note(layer, {id(layer.weight)})
    known = len(gathered_parameters._TRAINED)
    del layer
    gc.collect()
    assert len(gathered_parameters._TRAINED) < known


def test_scripted_modules_are_known_too() -> None:
    layer = torch.jit.script(nn.Linear(2, 2))
    weight = next(layer.parameters())
    gathered_parameters.note(layer, {id(weight)})
    assert gathered_parameters.trained_in(layer) == {id(weight)}
