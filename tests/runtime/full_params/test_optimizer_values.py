"""Whole optimizer states into pages and out of them, on one rank, wherever the pages are. Several ranks: tests/ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from values_by_hand import MIXED, PLACES, Odd, run_of, states_for

from lightning_ptm.errors import ConfigError


@pytest.mark.parametrize("place", list(PLACES))
def test_states_go_in_and_come_out(disk: Path, place: str) -> None:
    module = Odd()
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over()
        assert list(made.optimizer_values.states(0)) == [] and not made.optimizer_values.has_states(0)
        given = states_for(module, "head", "turned", "blocks.1.weight")
        made.optimizer_values.load(0, given)
        assert made.optimizer_values.has_states(0) and not made.optimizer_values.has_states(1)
        found = {id(parameter): state for parameter, state in made.optimizer_values.states(0)}
        assert found.keys() == given.keys()
        for key, state in given.items():
            assert found[key].keys() == state.keys()
            assert all(torch.equal(found[key][name], value) for name, value in state.items())
        order = [module.blocks[1].weight, module.bias, module.turned, module.head]
        scalars = made.optimizer_values.scalars_in_order(0, order)
        assert {at: state["step"].item() for at, state in scalars.items()} == {0: 15.0, 2: 6.0, 3: 4.0}
        assert list(scalars) == [0, 2, 3]
        # The returned scalars are copies.
        scalars[0]["step"].fill_(99.0)
        assert made.optimizer_values.scalars_in_order(0, order)[0]["step"] == 15.0
        made.optimizer_values.load(0, states_for(module, "bias"))
        moments = [made.gathered_flats.read(flat.states.slots["exp_avg"]) for flats in made.flats for flat in flats]
        assert sum(int(each.count_nonzero()) for each in moments) == 77  # the others start afresh
        assert [parameter is module.bias for parameter, _ in made.optimizer_values.states(0)] == [True]


def test_states_of_another_model(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk) as made:
        made.take_over()
        wrong = {id(module.bias): {"step": 1.0, "exp_avg": torch.zeros(76), "exp_avg_sq": torch.zeros(77)}}
        with pytest.raises(ConfigError, match=r"exp_avg of bias has shape \(76,\).* the parameter \(77,\)"):
            made.optimizer_values.load(0, wrong)
