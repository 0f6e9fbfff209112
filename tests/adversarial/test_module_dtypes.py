"""Modules whose tensors have dtypes of their own: the Trainer's precision does to them what it does on a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, assert_alike, compare, quietly, trained, trainer, vectors
from torch import Tensor, nn
from torchmetrics import MeanMetric


class Converting(Twin):
    """Converts its input to what each layer wants."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = x + torch.tanh(block(x.to(block.weight.dtype))).to(x.dtype)  # type: ignore[operator, union-attr]
        return self.head(x.to(self.head.weight.dtype))  # type: ignore[no-any-return]


class DoubleHead(Converting):
    def __init__(self) -> None:
        super().__init__()
        self.head.double()


class HalfHead(Converting):
    def __init__(self) -> None:
        super().__init__()
        self.head.bfloat16()


class AllBfloat16(Converting):
    """Model in bf16, as transformers gives it: `from_pretrained` keeps the file's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


class AllDouble(Converting):
    def __init__(self) -> None:
        super().__init__()
        self.double()


class ThreeDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(66, 66) / 8)
        self.scale = nn.Parameter(torch.randn(66).bfloat16())
        self.shift = nn.Parameter(torch.randn(66).double())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scale + self.shift


class ThreeDtypesInOneUnit(Converting):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = ThreeDtypes()


class FrozenHalfBlock(Converting):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].bfloat16().requires_grad_(False)


KINDS = [DoubleHead, HalfHead, AllBfloat16, AllDouble, ThreeDtypesInOneUnit, FrozenHalfBlock]


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "lock_free"])
def test_32_true_leaves_dtypes_as_they_are(kind: type[Twin], home: str, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at(home))


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_it_does_with_clipping_and_accumulation(
    kind: type[Twin], options: dict[str, Any], strategy_at: MakeStrategy
) -> None:
    compare(kind, strategy_at("ram"), **options)


@pytest.mark.parametrize("kind", [DoubleHead, HalfHead])
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_true_precisions_convert_all_of_them(kind: type[Twin], precision: str, strategy_at: MakeStrategy) -> None:
    compare(kind, strategy_at("ram"), precision=precision)


def test_a_validation_leaves_dtypes_as_they_are(strategy_at: MakeStrategy) -> None:
    with quietly():
        torch.manual_seed(0)
        ours = ThreeDtypesInOneUnit()
        trainer(strategy_at("all_on_disk")).validate(ours, vectors())
        torch.manual_seed(0)
        plain = ThreeDtypesInOneUnit()
        trainer().validate(plain, vectors())
    assert_alike(ours, plain)


def test_a_resumed_fit_has_the_dtypes_of_the_checkpoint(strategy_at: MakeStrategy, tmp_path: Any) -> None:
    path = tmp_path / "last.ckpt"
    with quietly():
        for strategy in (strategy_at("ram"), None):
            torch.manual_seed(0)
            first = ThreeDtypesInOneUnit()
            one = trainer(strategy)
            one.fit(first, vectors())
            one.save_checkpoint(path)
            saved = torch.load(path, weights_only=False)
            second = ThreeDtypesInOneUnit()
            trainer(strategy_at("lock_free") if strategy else None, max_epochs=2).fit(second, vectors(), ckpt_path=path)
            if strategy is not None:
                ours, states = second, saved["optimizer_states"][0]["state"]
    assert_alike(ours, second)
    expected = saved["optimizer_states"][0]["state"]
    assert {key: value["exp_avg"].dtype for key, value in states.items()} == {
        key: value["exp_avg"].dtype for key, value in expected.items()
    }


class Buffers(Converting):
    """Module with a buffer of every kind that dtype conversion has a rule for; each step records them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotary", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("wide", torch.arange(5.0).double() / 3)
        self.register_buffer("narrow", (torch.arange(5.0) / 3).half())
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("kept", torch.ones(2), persistent=False)
        self.mean = MeanMetric()
        self.seen: list[Any] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.mean.update(batch[0].mean())
        self.seen.append(
            [
                *((name, value.dtype, value.tolist()) for name, value in self.named_buffers()),
                self.mean.compute().dtype,
                self.mean.compute().item(),
                self.dtype,
                torch.empty(0).dtype,
                batch[0].dtype,
            ]
        )
        return super().training_step(batch, index)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_buffers_and_metrics_are_converted_as_on_a_single_device(precision: str, strategy_at: MakeStrategy) -> None:
    ours = trained(Buffers, strategy_at("ram"), precision=precision)
    plain = trained(Buffers, None, precision=precision)
    assert ours.seen == plain.seen
    assert_alike(ours, plain)


class ConfiguredLater(Converting):
    """Made in configure_model, with the default dtype that the precision has there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.blocks):
            self.default = torch.get_default_dtype()
            self.blocks = nn.ModuleList(nn.Linear(66, 66) for _ in range(3))
            self.register_buffer("scale", torch.rand(3))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_configure_model_has_the_precisions_default_dtype(precision: str, strategy_at: MakeStrategy) -> None:
    ours = trained(ConfiguredLater, strategy_at("ram"), precision=precision)
    plain = trained(ConfiguredLater, None, precision=precision)
    assert ours.default is plain.default
    assert_alike(ours, plain)


def test_init_module_has_it_too(strategy_at: MakeStrategy) -> None:
    dtypes = []
    for strategy in (strategy_at("ram"), None):
        with quietly(), trainer(strategy, precision="bf16-true").init_module():
            dtypes.append(nn.Linear(2, 2).weight.dtype)
    assert dtypes == [torch.bfloat16] * 2


class Copies(Twin):
    """Keeps copies of its weights from when its optimizer is made, as averages of weights do."""

    def configure_optimizers(self) -> Any:
        self.first = [parameter.detach().clone() for parameter in self.parameters()]
        return super().configure_optimizers()


@pytest.mark.diagonal
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true", "32-true", "bf16-mixed"])
def test_optimizers_are_made_for_converted_weights(precision: str, home: str, strategy_at: MakeStrategy) -> None:
    ours, plain = (
        trained(Copies, strategy, precision=precision, limit_train_batches=1) for strategy in (strategy_at(home), None)
    )
    for got, value in zip(ours.first, plain.first, strict=True):
        assert got.dtype is value.dtype and torch.equal(got, value)
