"""Parametrizations that a forward puts on and takes off again, as PEFT does for LoRA on packed experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import WIDTH, Twin, assert_alike, trained, vectors
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import CapacityError, UsageError


class Plus(nn.Module):
    """The weight and something else."""

    def __init__(self, more: Tensor | float) -> None:
        super().__init__()
        self.more = [more]

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.more[0]


class Inverse(Plus):
    """Has an inverse, which gives what it gets."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


@contextmanager
def put_on(layer: nn.Module, kind: nn.Module, name: str = "weight", *, unsafe: bool = False) -> Iterator[None]:
    trains = getattr(layer, name).requires_grad
    parametrize.register_parametrization(layer, name, kind, unsafe=unsafe)
    layer.parametrizations[name].original.requires_grad_(trains)  # type: ignore[index, union-attr]
    try:
        with parametrize.cached():
            yield
    finally:
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)


class Adapted(nn.Module):
    """A frozen layer with a low-rank addition."""

    frozen = True
    name = "weight"

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.1), nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        if self.frozen:
            self.base.requires_grad_(False)

    def kind(self) -> nn.Module:
        return Plus(self.a @ self.b)

    def forward(self, x: Tensor) -> Tensor:
        with put_on(self.base, self.kind()):
            return self.base(x)  # type: ignore[no-any-return]


class Trained(Adapted):
    frozen = False


class WithInverse(Trained):
    def kind(self) -> nn.Module:
        return Inverse(self.a @ self.b)


class OfBias(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        with put_on(self.base, Plus(self.a[:, 0]), "bias"):
            return self.base(x)  # type: ignore[no-any-return]


class OfBoth(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        with put_on(self.base, self.kind()), put_on(self.base, Plus(self.a[:, 0]), "bias"):
            return self.base(x)  # type: ignore[no-any-return]


class Twice(Adapted):
    """Called twice by its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class Nested(Adapted):
    """One on another."""

    def forward(self, x: Tensor) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(put_on(self.base, self.kind()))
            parametrize.register_parametrization(self.base, "weight", Plus(0.5))
            return self.base(x)  # type: ignore[no-any-return]


class Unsafe(Trained):
    def forward(self, x: Tensor) -> Tensor:
        with put_on(self.base, self.kind(), unsafe=True):
            return self.base(x)  # type: ignore[no-any-return]


class Checkpointed(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Penalized(Trained):
    """The parametrized weight is used beside the layer, too."""

    def forward(self, x: Tensor) -> Tensor:
        with put_on(self.base, self.kind()):
            return self.base(x) * self.base.weight.square().mean()  # type: ignore[no-any-return]


class Fails(Adapted):
    """An error inside, which is caught."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            with put_on(self.base, self.kind()):
                raise ValueError("mine")
        except ValueError:
            return self.base(x)  # type: ignore[no-any-return]


KINDS = [Adapted, Trained, WithInverse, OfBias, OfBoth, Twice, Nested, Unsafe, Checkpointed, Penalized, Fails]
PLACES = ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "recompute", "tight"]


def strategies(make: MakeStrategy, place: str) -> Iterator[Any]:
    if place == "tight":
        yield from (make("all_on_disk", device_memory=f"{kib}KiB") for kib in range(192, 2048, 64))
    elif place == "recompute":
        yield make("all_on_disk", recompute="all")
    else:
        yield make(place)


def same(make: MakeStrategy, place: str, build: Any, batches: Any = None, **options: Any) -> None:
    for strategy in strategies(make, place):
        try:
            ours = trained(build, strategy, batches, **options)
        except CapacityError:
            continue
        assert_alike(ours, trained(build, None, batches, **options))
        return
    raise AssertionError("no device memory is enough")


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)
def test_what_is_put_on_and_taken_off_is_no_write(strategy_at: MakeStrategy, place: str, kind: Any) -> None:
    class Whole(Twin):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(kind() for _ in range(3))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)

    same(strategy_at, place, Whole)


@pytest.mark.parametrize("place", ["all_on_disk", "tight"])
def test_what_the_step_puts_on_layers_of_the_root(strategy_at: MakeStrategy, place: str) -> None:
    class Step(Twin):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            with put_on(self.stem, Plus(0.1)), put_on(self.head, Inverse(0.1)):
                return super().training_step(batch, index)

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            with put_on(self.stem, Plus(0.1)):
                super().validation_step(batch, index)

        def val_dataloader(self) -> Any:
            return vectors()

    same(strategy_at, place, Step)


def test_one_that_changes_the_weight_is_a_write(strategy_at: MakeStrategy) -> None:
    class Doubled(Plus):
        def right_inverse(self, weight: Tensor) -> Tensor:
            return weight * 2

    class Writes(Twin):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            with put_on(self.stem, Doubled(0.0)):
                return super().training_step(batch, index)

    with pytest.raises(UsageError, match=r"stem.weight|stem.parametrizations.weight.original"):
        trained(Writes, strategy_at("all_on_disk"))


def _qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
    )


def _gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            sliding_window=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("build", [_qwen, _gpt_oss])
def test_lora_on_packed_experts(strategy_at: MakeStrategy, place: str, build: Any) -> None:
    import peft

    class Tuned(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []
            experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=experts)
            self.model = peft.get_peft_model(build(), config)
            for each in self.model.parameters():
                if each.requires_grad:
                    nn.init.normal_(each, std=0.1)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.model(input_ids=batch[0], labels=batch[0]).loss
            self.losses.append(loss.detach().clone())
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)

    words = torch.randint(0, 64, (6, 12), generator=torch.Generator().manual_seed(1))
    same(strategy_at, place, Tuned, DataLoader(TensorDataset(words), batch_size=2))
