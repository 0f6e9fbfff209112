"""Weights that a run does not train come back with all their bits and in their dtypes, whatever it computes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import ByHand, Judged, MakeStrategy, assert_alike, batches, run, trainer
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import UsageError

PLACES = ["ram", "all_on_disk", "three_tiers", "lock_free"]


class Nothing(ByHand):
    """Statistics over a loader, by a fit: there are no optimizers."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> None:
        return None


class AutomaticNothing(Judged):
    """Program that trains nothing, with Lightning's own loop; its backward passes have no effect."""

    def configure_optimizers(self) -> None:
        return None


class AllFrozen(Nothing):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class OfOthers(ByHand):
    """The optimizer has a tensor that is in no module."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)


class OfTheHead(Judged):
    """All but the head is in no optimizer, and takes gradients all the same."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2, fused=True)


class Doubles(Nothing):
    """Some have more bits than a mixed precision keeps of those that it trains, or as few as it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].wide = nn.Parameter(torch.rand(64, dtype=torch.float64), requires_grad=False)
        self.blocks[1].narrow = nn.Parameter(torch.rand(64, 65, dtype=torch.bfloat16), requires_grad=False)


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_kept(ours: nn.Module, before: dict[str, Tensor], but: str = "\0") -> None:
    for name, value in ours.state_dict().items():
        if not name.startswith(but):
            assert value.dtype is before[name].dtype and torch.equal(value, before[name]), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("build", [Nothing, AutomaticNothing, AllFrozen, OfOthers, OfTheHead, Doubles])
def test_they_come_back_as_they_were(build: type[Judged], place: str, strategy_at: MakeStrategy) -> None:
    torch.manual_seed(0)
    before = bits(build())
    ours = run(build, strategy_at(place), precision="bf16-mixed")
    assert_kept(ours, before, "head" if build is OfTheHead else "\0")


@pytest.mark.filterwarnings("ignore")
def test_of_a_module_on_the_meta_device_they_have_the_bits_of_their_first_values(strategy_at: MakeStrategy) -> None:
    def made(strategy: AngelPTMStrategy) -> Nothing:
        torch.manual_seed(0)
        with torch.device("meta"):
            module = Nothing()
        for each in module.blocks:
            each.reset_parameters = lambda block=each: nn.init.uniform_(block.scale)
        trainer(strategy, precision="bf16-mixed").fit(module, batches())
        return module

    for name, value in made(strategy_at("ram")).state_dict().items():
        assert value.dtype is torch.float32, name
        assert "weight" not in name or not torch.equal(value, value.bfloat16().float()), f"{name} was rounded"


@pytest.mark.filterwarnings("ignore")
def test_what_was_saved_of_them_has_all_bits(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Nothing()
    before = bits(module)
    of = trainer(strategy_at("all_on_disk"), precision="bf16-mixed")
    module.on_train_batch_end = lambda *_: of.save_checkpoint(tmp_path / "last.ckpt")
    of.fit(module, batches())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in before.items())


# -- other dtypes, in the user's hands -----------------------------------------------------------------------------------

CONVERSIONS = [
    lambda module: module.head.double(),
    lambda module: module.blocks[1].bfloat16(),
    lambda module: module.head.half(),
    lambda module: module.blocks[0].to(torch.float64),
    lambda module: module.to(torch.bfloat16),
    lambda module: setattr(module.head.bias, "data", module.head.bias.data.double()),
    lambda module: module.blocks[0].inner[0].type(torch.float64),
    lambda module: module.head._apply(lambda tensor: tensor.half()),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["ram", "ram, bf16-mixed", "all_on_disk", "three_tiers"])
@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_layer_that_is_converted_in_mid_run_is_refused_with_its_name(
    convert: Any, place: str, strategy_at: MakeStrategy
) -> None:
    class Converts(Judged):
        def on_train_batch_end(self, *ignored: Any) -> None:
            self.zero_grad()  # what a step has used cannot be converted
            with self.trainer.strategy.gathered(self):
                convert(self)

    tier, _, precision = place.partition(", ")
    with pytest.raises(UsageError, match=r"(first|head|blocks\.\d)\.\S+ was given the dtype torch\.\w+ inside of"):
        run(Converts, strategy_at(tier), precision=precision or "32-true")


@pytest.mark.parametrize("place", ["ram", "all_on_disk"])
def test_a_conversion_there_and_back_does_no_harm(place: str, strategy_at: MakeStrategy) -> None:
    class Converts(Judged):
        def on_train_batch_end(self, *ignored: Any) -> None:
            self.zero_grad()  # what a step has used cannot be converted
            with self.trainer.strategy.gathered(self):
                self.double()
                self.head.weight.data.mul_(1 + 1e-9)
                self.float()

    class Plain(Judged):
        def on_train_batch_end(self, *ignored: Any) -> None:
            self.head.weight.data = (self.head.weight.data.double() * (1 + 1e-9)).float()

    assert_alike(run(Converts, strategy_at(place)), run(Plain, None))
