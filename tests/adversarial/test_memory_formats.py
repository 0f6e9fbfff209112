"""Weights and gradients that are not contiguous: transposed, channels_last, expanded. Their memory format stays what it is.

Kernels are chosen by strides, and a fused update rounds the last, partial vector of a tensor's memory in another way than the
rest, so the bits show where an element lies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, assert_alike, compare, quietly, trained, trainer, vectors
from torch import Tensor, nn

from lightning_ptm import ConfigError

HOMES = ("ram", "all_on_disk", "three_tiers", "lock_free")
IMAGES = vectors(3, 9, 9)


def _transposed(values: Tensor) -> nn.Parameter:
    """Returns the same values in column-major memory."""
    return nn.Parameter(values.detach().t().contiguous().t())


class Transposed(Twin):
    """Model with a transposed weight, as a checkpoint of another library gives it: `linear.weight =
    Parameter(values.t())`."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (*self.blocks, self.stem, self.head):
            layer.weight = _transposed(layer.weight)  # type: ignore[arg-type]


class Columns(nn.Module):
    """transformers' Conv1D: inputs times weights, (in, out)."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.weight = _transposed(torch.randn(width, wide) / 8)
        self.bias = nn.Parameter(torch.zeros(wide))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class ColumnsTimes(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Columns(66, 66) for _ in range(3))


class Images(Twin):
    """Convolutions; `format` of weights, `of_inputs` of images."""

    format = torch.channels_last
    of_inputs = torch.contiguous_format

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(7, 21, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(21), nn.Conv2d(21, 7, 3, padding=1))
            for _ in range(3)
        )
        self.head = nn.Conv2d(7, 5, 1)
        self.to(memory_format=self.format)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step([batch[0].contiguous(memory_format=self.of_inputs)], index)


class ImagesOfItsFormat(Images):
    of_inputs = torch.channels_last


class Volumes(Twin):
    """Five dimensions, grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(3, 6, 3)
        self.blocks = nn.ModuleList(nn.Conv3d(6, 6 * 66, 3, padding=1, groups=3) for _ in range(1))
        self.blocks.append(nn.Conv3d(6 * 66, 6, 1))
        self.head = nn.Conv3d(6, 5, 1)
        self.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.stem, *self.blocks, self.head):
            x = layer(x)
        return x


class PermutedParts(Twin):
    """Weights of three dimensions in memory orders of their own, and one of a single column."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(5, 7, 66).permute(2, 0, 1))
        self.column = nn.Parameter(torch.randn(1, 66).t())
        self.empty = nn.Parameter(torch.randn(3, 0).t())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x)) * self.column.squeeze(1)
        return self.head(x + torch.einsum("bi,ijk->bi", x, self.cube) + self.empty.sum())  # type: ignore[no-any-return]


class StridedGradients(Twin):
    """Contiguous weights whose gradients come transposed, expanded, and in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(11, 13))
        self.table = nn.Parameter(torch.randn(13, 66) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) @ self.table.t() @ self.table
        return self.head(x) + self.offset.sum() * 1e-2 + self.offset[:, 3].sum()  # type: ignore[no-any-return]


KINDS = [
    (Transposed, vectors()),
    (ColumnsTimes, vectors()),
    (Images, vectors(3, 9, 9)),
    (ImagesOfItsFormat, vectors(3, 9, 9)),
    (Volumes, vectors(3, 5, 5, 5)),
    (PermutedParts, vectors()),
    (StridedGradients, vectors()),
]


@pytest.mark.diagonal
@pytest.mark.parametrize(("kind", "batches"), KINDS)
@pytest.mark.parametrize("home", HOMES)
def test_they_keep_their_memory_format_and_bits(
    kind: type[Twin], batches: Any, home: str, strategy_at: MakeStrategy
) -> None:
    compare(kind, strategy_at(home), batches)


@pytest.mark.slow_unless(
    "ram-{'accumulate_grad_batches': 2}-ImagesOfItsFormat-batches1",
    "ram-{'gradient_clip_val': 0.01}-Transposed-batches0",
    "ram-{'precision': '64-true'}-ImagesOfItsFormat-batches1",
    "masters_on_disk-{'accumulate_grad_batches': 2}-Transposed-batches0",
    "masters_on_disk-{'gradient_clip_val': 0.01}-ImagesOfItsFormat-batches1",
    "masters_on_disk-{'precision': '64-true'}-Transposed-batches0",
)
@pytest.mark.parametrize(("kind", "batches"), [KINDS[0], KINDS[3]])
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.01}, {"precision": "64-true"}], ids=str
)
@pytest.mark.parametrize("home", ["ram", "masters_on_disk"])
def test_they_do_with(
    options: dict[str, Any], kind: type[Twin], batches: Any, home: str, strategy_at: MakeStrategy
) -> None:
    compare(kind, strategy_at(home), batches, **options)


@pytest.mark.parametrize(("kind", "batches"), [KINDS[1], KINDS[2]])
def test_they_do_when_units_are_recomputed(kind: type[Twin], batches: Any, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at("all_on_disk", recompute="all"), batches)


class Frozen(Transposed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


def test_frozen_ones_do(strategy_at: MakeStrategy) -> None:
    compare(Frozen, strategy_at("all_on_disk"))


class EditedByHand(Transposed):
    """Reads and edits its weights, and reads its gradients, in the middle of the fit."""

    def on_train_batch_end(self, *args: Any) -> None:
        gathered = getattr(self.trainer.strategy, "gathered", None)
        if gathered is None:
            self._edit()
        else:
            with gathered(self):
                self._edit()

    @torch.no_grad()
    def _edit(self) -> None:
        for block in self.blocks:
            block.weight[0].mul_(0.5)  # type: ignore[index, operator]
            self.losses.append(block.weight.clone())  # type: ignore[operator]


@pytest.mark.parametrize("home", ["ram", "all_on_disk", "lock_free"])
def test_ones_that_are_edited_when_gathered_do(home: str, strategy_at: MakeStrategy) -> None:
    compare(EditedByHand, strategy_at(home))


def test_checkpoints_hold_them_and_go_on(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    """Written by one side, continued by the other; a second fit of the same module, too."""
    ours, plain = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    modules = []
    with quietly():
        for strategy, path, other in ((strategy_at("ram"), ours, plain), (None, plain, ours)):
            torch.manual_seed(0)
            module = Transposed()
            first = trainer(strategy)
            first.fit(module, vectors())
            first.save_checkpoint(path)
            modules.append((module, strategy, other))
        saved = [torch.load(path, weights_only=False) for path in (ours, plain)]
        for module, strategy, other in modules:
            again = strategy_at("all_on_disk") if strategy else None
            trainer(again, max_epochs=2).fit(module, vectors(), ckpt_path=other)
    assert {key: value.stride() for key, value in saved[0]["state_dict"].items()} == {
        key: value.stride() for key, value in saved[1]["state_dict"].items()
    }
    moments = [{key: state["exp_avg"] for key, state in each["optimizer_states"][0]["state"].items()} for each in saved]
    for key, moment in moments[1].items():
        assert moments[0][key].stride() == moment.stride()
        assert torch.equal(moments[0][key], moment)
    assert_alike(modules[0][0], modules[1][0])


def test_a_sharded_checkpoint_of_contiguous_weights_is_read_into_them(
    strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    folder = tmp_path / "sharded"
    with quietly():
        torch.manual_seed(0)
        module = Twin()
        first = trainer(strategy_at("ram", checkpoints={"state_dict_type": "sharded"}))
        first.fit(module, vectors())
        first.save_checkpoint(folder)
        expected = {name: value.clone() for name, value in module.state_dict().items()}
        transposed = Transposed()
        trainer(strategy_at("all_on_disk")).validate(transposed, vectors(), ckpt_path=folder)
    for name, value in transposed.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_sharded_checkpoints_refuse_them_at_the_start(strategy_at: MakeStrategy) -> None:
    with pytest.raises(
        ConfigError,
        match=r"stem.weight has strides \(1, 66\).*5 such.*use checkpoints=Checkpoints\(state_dict_type='full'\)",
    ):
        trained(Transposed, strategy_at("ram", checkpoints={"state_dict_type": "sharded"}))


class WithGaps(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(4, 6)[:, :3])


def test_a_weight_with_gaps_is_refused_at_the_start(strategy_at: MakeStrategy) -> None:
    with pytest.raises(
        ConfigError, match=r"part of shape \(4, 3\) has strides \(6, 1\).*nn.Parameter\(tensor.clone\(\)\)"
    ):
        trained(WithGaps, strategy_at("ram"))


class OnTheMetaDevice(Twin):
    """First values of transposed weights are drawn in set-up."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            for block in self.blocks:
                block.weight = nn.Parameter(torch.empty(66, 66).t())

    def init_weights(self, module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]


def test_meta_weights_get_their_memory_format(strategy_at: MakeStrategy) -> None:
    ours = trained(OnTheMetaDevice, strategy_at("all_on_disk"))
    assert [block.weight.stride() for block in ours.blocks] == [(1, 66)] * 3
    assert all(block.weight.isfinite().all() for block in ours.blocks)
