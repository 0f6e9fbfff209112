"""Modules that are fetched together, and owners of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.units.discovery import MIN_UNIT_NUMEL, Unit, discover, overlap, with_vectors_at_root


class Part(nn.Module):
    """Layer with as many parameters as a unit has at least, or fewer."""

    def __init__(self, numel: int = MIN_UNIT_NUMEL) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))


class Model(nn.Module):
    """A root with parameters of its own, and parts."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(3))
        self.parts = nn.ModuleList(parts)


def names(units: tuple[Unit, ...]) -> dict[str, list[str]]:
    """By unit, its parameters; and what holds of all units."""
    assert [unit.index for unit in units] == list(range(len(units)))
    root = units[0].module
    order = [id(module) for module in root.modules()]
    places = [order.index(id(unit.module)) for unit in units]
    assert places == sorted(set(places))  # I2
    owned = [id(item.parameter) for unit in units for item in unit.parameters]
    assert sorted(owned) == sorted(map(id, root.parameters()))  # I1
    for unit in units:
        assert root.get_submodule(unit.name) is unit.module
        for item in unit.parameters:
            assert all(getattr(module, attribute) is item.parameter for module, attribute in item.places)
        assert list(unit.owners) == list(dict.fromkeys(module for item in unit.parameters for module, _ in item.places))
    return {unit.name: [item.name for item in unit.parameters] for unit in units}


def test_large_elements_of_containers_are_units_and_small_ones_stay_with_their_parent() -> None:
    assert names(discover(Model(Part(), Part(), Part(MIN_UNIT_NUMEL - 1)), "auto")) == {
        "": ["head", "parts.2.weight"],
        "parts.0": ["parts.0.weight"],
        "parts.1": ["parts.1.weight"],
    }


def test_one_unit_is_none() -> None:
    assert names(discover(Model(Part(), Part(5)), "auto")) == {"": ["head", "parts.0.weight", "parts.1.weight"]}
    assert names(discover(Part(), "auto")) == {"": ["weight"]}


def test_an_element_that_is_most_of_the_model_is_looked_into() -> None:
    inner = Model(Part(), Part())
    found = discover(nn.Sequential(inner, Part()), "auto")
    assert names(found) == {
        "": ["0.head"],
        "0.parts.0": ["0.parts.0.weight"],
        "0.parts.1": ["0.parts.1.weight"],
        "1": ["1.weight"],
    }
    # Without blocks of its own it stays a unit, however large.
    assert set(names(discover(nn.Sequential(Part(10 * MIN_UNIT_NUMEL), Part()), "auto"))) == {"", "0", "1"}


def test_units_that_users_name_may_be_nested() -> None:
    outer = Model(Part(7), Part(7))
    found = discover(nn.Sequential(outer, Part(2)), ["Model", "Part"])
    assert names(found) == {
        "": [],
        "0": ["0.head"],
        "0.parts.0": ["0.parts.0.weight"],
        "0.parts.1": ["0.parts.1.weight"],
        "1": ["1.weight"],
    }


def test_others_become_units_beside_those_that_are_found() -> None:
    model = Model(Part(), Part(), Part(5))
    assert "parts.2" in names(discover(model, "auto", [model.parts[2]]))
    assert set(names(discover(Model(Part(5)), "auto"))) == {""}


def test_what_several_units_share_is_the_roots() -> None:
    model = Model(Part(), Part(), Part())
    model.parts[1].weight = model.parts[0].weight
    units = discover(model, "auto")
    assert names(units) == {"": ["head", "parts.0.weight"], "parts.0": [], "parts.1": [], "parts.2": ["parts.2.weight"]}
    (_, shared) = units[0].parameters
    assert shared.places == ((model.parts[0], "weight"), (model.parts[1], "weight"))
    assert units[0].owners == (model, model.parts[0], model.parts[1])


def test_what_a_unit_holds_twice_is_its_own() -> None:
    twice: Any = Part()
    twice.other = twice.weight
    (_, unit, _) = discover(Model(twice, Part()), "auto")
    assert [(item.name, item.places) for item in unit.parameters] == [
        ("parts.0.weight", ((twice, "weight"), (twice, "other")))
    ]
    assert unit.owners == (twice,)


def test_a_module_in_two_places_is_found_once_by_its_first_name() -> None:
    part = Part()
    model: Any = Model(part, Part())
    model.again = nn.ModuleDict({"part": part})
    found = discover(model, "auto")
    assert names(found) == {"": ["head"], "parts.0": ["parts.0.weight"], "parts.1": ["parts.1.weight"]}
    assert found[1].parameters[0].places == ((part, "weight"),)


def test_what_is_inside_of_a_unit_is_the_units() -> None:
    deep: Any = Part()
    deep.inside = nn.Sequential(nn.Linear(2, 2, bias=False))
    found = discover(Model(deep, Part()), "auto")
    assert names(found)["parts.0"] == ["parts.0.weight", "parts.0.inside.0.weight"]


def test_a_root_of_a_class_that_users_name_is_no_unit_twice() -> None:
    assert list(names(discover(Model(Part(), Model(Part())), ["Model"]))) == ["", "parts.1"]


def test_classes_that_there_are_none_of() -> None:
    with pytest.raises(ConfigError, match=r"the class Block, .* its classes: ModuleList, Part"):
        discover(Model(Part()), ["Part", "Block"])


def test_parameters_without_shapes() -> None:
    with pytest.raises(ConfigError, match=r"parts\.0\.weight gets its shape in the first forward"):
        discover(Model(nn.LazyLinear(3)), "auto")


class Block(nn.Module):
    """A matrix, with a scale beside it and, where it is told so, a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.layer = nn.Linear(64, 64)


def test_vectors_of_divided_units_are_the_roots() -> None:
    """The whole ones: a bias of which each rank has a part stays; and what is in no divided unit, or not on all ranks."""
    root = Model(Block(), Block(), Block())
    first, _, third = root.parts
    parts = {id(each): 2 for block in (first, third) for each in (block.layer.weight, block.layer.bias)}
    parts.pop(id(third.layer.bias))
    found = discover(root, "auto", parts=parts)
    before = names(found)
    after = with_vectors_at_root(found, parts, apart={3})
    assert names(after) == {
        "": ["head", "parts.0.norm.weight", "parts.0.norm.bias"],
        "parts.0": ["parts.0.layer.weight", "parts.0.layer.bias"],
        "parts.1": before["parts.1"],
        "parts.2": before["parts.2"],
    }
    at_root = with_vectors_at_root(found, parts)
    assert names(at_root)[""][-3:] == ["parts.2.norm.weight", "parts.2.norm.bias", "parts.2.layer.bias"]
    for unit, was in zip(at_root, found, strict=True):
        assert unit.own == was.own == was.parameters
    # The modules that hold a unit's parameters: a layer with a matrix of one and a bias of the other is of both.
    assert {id(each) for each in at_root[0].owners} == set(map(id, (root, first.norm, third.norm, third.layer)))
    assert third.layer in at_root[3].owners and third.norm not in at_root[3].owners


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
