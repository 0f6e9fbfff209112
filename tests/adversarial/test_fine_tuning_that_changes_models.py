"""Vocabularies that grow and adapters that come and go in mid-run, in models of transformers and peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, judge
from test_other_parameters import HOMES, Changing
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def tiny(*, tied: bool = True) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=32, n_layer=2, n_head=2, tie_word_embeddings=tied
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return transformers.GPT2LMHeadModel(config)


class Tuned(Changing):
    """The loss of a small GPT-2."""

    tied = True

    def __init__(self) -> None:
        Judged.__init__(self)
        del self.first, self.blocks, self.head
        self.model: Any = tiny(tied=self.tied)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = batch[0].mul(7).long().abs() % self.model.config.vocab_size
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.note(loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)


class Growing(Tuned):
    def embeddings(self) -> list[Tensor]:
        first, last = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        return [first] if last is first else [first, last]

    def change(self) -> None:
        old = self.embeddings()
        self.model.resize_token_embeddings(50, mean_resizing=False)
        for each in old:
            self.optimizers().state.pop(each, None)
        self.swap(old, self.embeddings())


class GrowingUntied(Growing):
    tied = False


class Adapted(Tuned):
    """Model with adapters of peft around its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.model = peft.get_peft_model(self.model, self.adapter())

    @staticmethod
    def adapter() -> Any:
        return peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = batch[0].mul(7).long().abs() % 40
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.note(loss)
        return loss

    def layers(self) -> list[Any]:
        return [each for each in self.model.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]


class Restarted(Adapted):
    """ReLoRA: adapters are merged into what they adapt, and begin anew, and their optimizer with them."""

    def change(self) -> None:
        for layer in self.layers():
            base = layer.get_base_layer()
            base.weight += layer.get_delta_weight("default")
            torch.manual_seed(self.current_epoch)
            layer.reset_lora_parameters("default", True)
        for each in self.parameters():
            if each.requires_grad:
                self.optimizers().state.pop(each, None)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            with self.whole(), torch.no_grad():
                self.change()


class OnlyStatesAreReset(Restarted):
    """Drops all states, as code does that has one set of moments."""

    def change(self) -> None:
        super().change()
        self.optimizers().state.clear()


class Another(Adapted):
    """A second adapter, which trains while the first one rests; then the first one again, and the second is deleted."""

    def change(self) -> None:
        old = [each for each in self.parameters() if each.requires_grad]
        torch.manual_seed(self.current_epoch)
        if self.current_epoch == 1:
            self.model.add_adapter("second", self.adapter())
            self.model.set_adapter("second")
        else:
            self.model.set_adapter("default")
            self.model.delete_adapter("second")
        for each in old:
            self.optimizers().state.pop(each, None)
        self.swap(old, [each for each in self.parameters() if each.requires_grad])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            with self.whole(), torch.no_grad():
                self.change()


class Merged(Adapted):
    """The adapters end, and what they have adapted trains."""

    def change(self) -> None:
        old = [each for each in self.parameters() if each.requires_grad]
        self.model = self.model.merge_and_unload()
        self.model.requires_grad_(True)
        self.swap(old, self.model.parameters())


BUILDS = [Growing, GrowingUntied, Restarted, OnlyStatesAreReset, Another, Merged]


@pytest.mark.diagonal
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("home", HOMES)
def test_a_model_that_is_changed_trains_as_with_a_plain_trainer(
    strategy_at: MakeStrategy, build: type[Judged], home: str
) -> None:
    judge(build, strategy_at(home), max_epochs=3)
