"""Experts that ranks can divide, and messages about those that they cannot. Other ranks need not exist."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError
from lightning_ptm.models.moe import Expert, MixtureOfExperts
from lightning_ptm.planning.expert_split import counts, owners
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.runtime.units.divided_experts import DividedExperts, divide, expert_layers, experts_of


def layer(experts: int = 5) -> MixtureOfExperts:
    return MixtureOfExperts(
        8,
        16,
        experts=experts,
        choices=1,
        capacity_factor=1.25,
        eval_capacity_factor=2.0,
        jitter=0.0,
        gated=False,
        dropout=0.0,
    )


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(layer() for _ in range(2))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.blocks[0](self.embedding(batch))[0].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def divided(model: nn.Module, size: int = 2, *units: str, recomputed: bool = False) -> DividedExperts:
    wanted = units or "auto"
    experts = [expert for _, each in expert_layers(model) for expert in experts_of(each)]
    mesh = Mesh({Axis.DATA: 2, Axis.EXPERT: size})
    return divide(model, discover(model, wanted, experts), mesh, recomputed=recomputed)


class Pair(nn.Module):
    """Block with two layers of five experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()


def test_experts_of_all_layers_in_a_recomputed_unit_are_on_the_device_at_once() -> None:
    model = nn.Sequential(Pair(), layer())
    sizes = {
        (): [3, 2, 3, 2, 3, 2],  # each layer is a unit, or none is
        ("Expert",): [3, 2, 3, 2, 3, 2],
        ("Pair", "MixtureOfExperts", "Expert"): [6, 4, 3, 2],
        ("Pair", "Expert"): [6, 4, 3, 2],
    }
    for units, expected in sizes.items():
        found = divided(model, 2, *units, recomputed=True)
        assert [len(each) for each in found.at_once] == expected
        assert sorted(unit for each in found.at_once for unit in each) == sorted(found.members)
        assert {len(each) for each in divided(model, 2, *units).at_once} == {1}


@pytest.mark.parametrize(("size", "held"), [(2, (3, 2)), (3, (2, 2, 1)), (5, (1,) * 5)])
def test_who_holds_what(size: int, held: tuple[int, ...]) -> None:
    assert counts(5, size) == held
    found = owners(5, size)
    assert list(found) == sorted(found)
    assert tuple(found.count(member) for member in range(size)) == held


def test_experts_are_units_by_themselves_and_the_rest_is_everybodys() -> None:
    model = Model()
    found = divided(model)
    names = {unit.index: unit.name for unit in discover(model, ["Expert"])}
    assert [name for name, _ in found.layers] == ["blocks.0", "blocks.1"]
    assert {names[unit]: member for unit, member in found.members.items()} == {
        f"blocks.{block}.experts.{expert}": int(expert >= 3) for block in range(2) for expert in range(5)
    }
    elsewhere = found.holders.remote_units
    assert sorted(elsewhere(0) | elsewhere(1)) == sorted(found.members)
    assert elsewhere(2) == elsewhere(0)
    unit = found.units[1][4][0]
    assert names[unit] == "blocks.1.experts.4"
    assert found.teams.holders[unit] == (1, 3)


def no_experts(model: Model) -> None:
    model.blocks = nn.ModuleList([nn.Linear(8, 8)])


def few_experts(model: Model) -> None:
    model.blocks[1] = layer(experts=2)


def shared_between_layers(model: Model) -> None:
    model.blocks[1].experts[0] = model.blocks[0].experts[0]


def shared_between_experts(model: Model) -> None:
    model.blocks[0].experts[4].expand = model.blocks[0].experts[0].expand


def shared_with_others(model: Model) -> None:
    model.tied = nn.Linear(8, 16, bias=False)
    model.tied.weight = model.blocks[0].experts[2].expand


def with_buffer(model: Model) -> None:
    model.blocks[0].experts[1].register_buffer("seen", nn.Parameter().detach())


def not_a_list(model: Model) -> None:
    model.blocks[0].experts = nn.ModuleDict({"0": Expert(8, 16, gated=False, dropout=0.0)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_experts, "expert_parallel_size=3 and the Model has no layer whose experts could be divided"),
        (few_experts, r"blocks.1 \(MixtureOfExperts\) has 2 experts and expert_parallel_size=3"),
        (shared_between_layers, r"blocks.1.experts.0 \(Expert\) shares parameters with blocks.0.experts.0"),
        (shared_between_experts, r"blocks.0.experts.4 \(Expert\) shares parameters with blocks.0.experts.0"),
        (shared_with_others, r"blocks.0.experts.2 \(Expert\) shares parameters with a Linear outside of it"),
        (with_buffer, r"blocks.0.experts.1 \(Expert\) has buffers \(seen\)"),
        (not_a_list, "its `experts` is a ModuleDict"),
    ],
)
def test_what_cannot_be_divided(change: Callable[[Model], None], says: str) -> None:
    model = Model()
    change(model)
    with pytest.raises(ConfigError, match=says):
        divided(model, 3)


def test_units_without_the_experts() -> None:
    with pytest.raises(ConfigError, match=r"a part of the unit blocks.0, which all ranks hold.* add 'Expert' to units"):
        divided(Model(), 2, "MixtureOfExperts")


def test_ranks_that_groups_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="expert_parallel_size=2 does not divide the number of ranks, 3"):
        Mesh.of(3, {Axis.EXPERT: 2})
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=AngelPTMStrategy(expert_parallel_size=2), logger=False, max_epochs=1
    )
    with pytest.raises(ConfigError, match="does not divide the number of ranks, 1"):
        trainer.fit(Model(), DataLoader([0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, True, "2", 2.0])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(ConfigError, match="expert_parallel_size="):
        AngelPTMStrategy(expert_parallel_size=size)


def test_experts_compute_in_the_ticks_of_units_around_them_and_beside_them() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp, self.last = nn.Linear(4, 4), layer(), nn.Linear(4, 4)

    model = nn.Sequential(nn.Linear(4, 4), Block())
    around = {
        ("Block", "Expert"): ["1"],
        ("Block", "Linear", "Expert"): ["1", "1.attention", "1.last"],
        ("Block", "MixtureOfExperts", "Expert"): ["1.mlp"],
        ("Linear", "Expert"): ["", "0", "1.attention", "1.last"],  # no unit but the root is around the layer
    }
    for wanted, expected in around.items():
        found = divided(model, 2, *wanted)
        experts = [expert for _, each in expert_layers(model) for expert in experts_of(each)]
        names = {unit.index: unit.name for unit in discover(model, list(wanted), experts)}
        assert sorted(names[index] for index in found.around) == expected
