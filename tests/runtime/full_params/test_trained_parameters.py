"""Which parameters runs have trained: known by module and attribute, for as long as the module lives."""

from __future__ import annotations

import gc

import torch
from torch import nn

from lightning_ptm.runtime.full_params import trained_parameters


def test_what_a_run_has_trained_is_known_behind_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert trained_parameters.trained_in(model) == frozenset()
    trained_parameters.note(model, {id(model[0].weight)})
    trained_parameters.note(model, {id(model[1].bias)})
    assert trained_parameters.trained_in(model) == {id(model[0].weight), id(model[1].bias)}
    assert trained_parameters.trained_in(model[1]) == {id(model[1].bias)}


def test_another_parameter_in_its_place_counts_as_trained() -> None:
    layer = nn.Linear(2, 2)
    trained_parameters.note(layer, {id(layer.weight)})
    layer.weight = nn.Parameter(torch.zeros(3, 2))
    assert trained_parameters.trained_in(layer) == {id(layer.weight)}
    del layer.weight
    assert id(layer.bias) not in trained_parameters.trained_in(layer)


def test_tied_parameters_are_known_in_every_module() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    trained_parameters.note(nn.ModuleList([one, two]), {id(one.weight)})
    assert trained_parameters.trained_in(two) == {id(one.weight)}


def test_a_module_that_is_gone_is_forgotten() -> None:
    layer = nn.Linear(2, 2)
    trained_parameters.note(layer, {id(layer.weight)})
    known = len(trained_parameters._TRAINED)
    del layer
    gc.collect()
    assert len(trained_parameters._TRAINED) < known


def test_scripted_modules_are_known_too() -> None:
    layer = torch.jit.script(nn.Linear(2, 2))
    weight = next(layer.parameters())
    trained_parameters.note(layer, {id(weight)})
    assert trained_parameters.trained_in(layer) == {id(weight)}
