"""GPT by itself: sizes, initialisation, building on the meta device, and the steps that a Trainer calls."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.models import GPT
from lightning_ptm.models.base import warmup_cosine
from lightning_ptm.models.gpt import INIT_STD

SMALL = {"vocab_size": 32, "width": 16, "layers": 2, "heads": 2, "sequence_length": 8}


def build(**changes: object) -> GPT:
    model = GPT(**(SMALL | changes))  # type: ignore[arg-type]
    model.configure_model()
    return model


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    tokens = torch.arange(16 * 9).view(16, 9) % 32
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)


def quiet_trainer(root: Path, **settings: object) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=root, **(quiet | settings))  # type: ignore[arg-type]


def test_forward_gives_logits_for_each_token_and_any_shorter_sequence() -> None:
    model = build()
    assert model(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 32)
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 32)


def test_a_token_does_not_see_the_ones_after_it() -> None:
    model = build()
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert not torch.equal(before[:, 5], after[:, 5])


@pytest.mark.parametrize("shape", [{}, {"width": 18, "heads": 4, "head_width": 6, "feed_forward_width": 37}])
@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_parameter_numel_is_what_is_built(tie_head: bool, meta: bool, shape: dict[str, int]) -> None:
    model = GPT(**(SMALL | shape), tie_head=tie_head, meta=meta)
    predicted = model.parameter_numel
    model.configure_model()
    assert predicted == sum(parameter.numel() for parameter in model.parameters())


def test_gpt2_124m_has_as_many_parameters_as_published() -> None:
    model = GPT(vocab_size=50257, width=768, layers=12, heads=12, sequence_length=1024, tie_head=True, meta=True)
    assert model.parameter_numel == 124_439_808


def test_flops_per_token_counts_the_matrix_multiplications() -> None:
    model = build()
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert model.flops_per_token == 6 * matrices + 12 * 2 * 16 * 8


def test_configure_model_builds_once() -> None:
    model = build()
    first = dict(model.named_parameters())
    model.configure_model()
    assert all(first[name] is parameter for name, parameter in model.named_parameters())


def test_meta_parameters_take_no_memory_and_metrics_stay_real() -> None:
    model = build(meta=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.val_loss.update(torch.tensor(2.0), 3)
    assert model.val_loss.compute() == 2.0


def test_tied_head_is_one_parameter() -> None:
    for meta in (False, True):
        model = build(tie_head=True, meta=meta)
        assert model.head.weight is model.token_embedding.weight
        assert "head.weight" not in dict(model.named_parameters())


def check_initialisation(model: GPT) -> None:
    residual_std = INIT_STD / math.sqrt(2 * model.layers)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.count_nonzero(parameter) == 0, name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = residual_std if name.endswith("project.weight") else INIT_STD
            # The standard deviation of n normal draws is itself uncertain by expected / sqrt(2 n): five times that.
            tolerance = 5 * expected / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() - expected) < tolerance, name
            assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_eager_and_meta_builds_have_the_initialisation_of_gpt2() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "width": 64, "layers": 3, "heads": 4, "sequence_length": 64}
    check_initialisation(build(**sizes))

    late = build(**sizes, meta=True)
    for module in reversed(list(late.modules())):  # any order must do: the strategy has its own
        if next(module.parameters(recurse=False), None) is not None:
            module.to_empty(device="cpu", recurse=False)
            for parameter in module.parameters(recurse=False):
                parameter.detach().fill_(math.nan)
            late.init_weights(module)
    check_initialisation(late)


def test_init_weights_touches_only_what_the_module_itself_owns() -> None:
    model = build()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.init_weights(model.blocks[0])
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_only_matrices_decay_and_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    model = GPT(**SMALL, weight_decay=0.3)
    model.configure_model()
    model.position_embedding.weight.requires_grad_(False)
    trainer = quiet_trainer(tmp_path, max_steps=2, enable_checkpointing=False)
    trainer.fit(model, loader())
    decayed, plain = trainer.optimizers[0].param_groups
    assert decayed["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0.0
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    optimized = {id(parameter) for parameter in itertools.chain(decayed["params"], plain["params"])}
    assert optimized == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def test_warmup_cosine_goes_up_to_the_peak_and_down_to_the_fraction() -> None:
    rates = [warmup_cosine(s, warmup_steps=4, total_steps=20, final_fraction=0.1) for s in range(30)]
    assert rates[0] > 0
    assert rates[4] == max(rates) == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[4:21] == sorted(rates[4:21], reverse=True)
    assert rates[20:] == pytest.approx([0.1] * 10)


def test_warmup_longer_than_the_run_stays_below_the_peak() -> None:
    assert warmup_cosine(4, warmup_steps=100, total_steps=5, final_fraction=0.1) < 0.1


def test_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, max_epochs=-1, enable_checkpointing=False)
    with pytest.raises(ConfigError, match="max_steps"):
        trainer.fit(GPT(**SMALL), loader())


def test_metrics_are_means_over_tokens_and_perplexity_is_their_exponential(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build()
    ragged = DataLoader(loader().dataset, batch_size=6)  # the last batch has 4 sequences
    trainer = quiet_trainer(tmp_path, enable_checkpointing=False)
    (metrics,) = trainer.validate(model, ragged, verbose=False)
    with torch.no_grad():
        tokens, targets = loader().dataset[:]
        expected = model.loss((tokens, targets)).item()
    assert metrics["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["val_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_predict_gives_the_loss_of_each_sequence(tmp_path: Path) -> None:
    model = build()
    trainer = quiet_trainer(tmp_path, enable_checkpointing=False)
    predictions = trainer.predict(model, loader())
    assert predictions is not None
    losses = torch.cat(predictions)  # type: ignore[arg-type]
    assert losses.shape == (16,)
    with torch.no_grad():
        assert losses.mean().item() == pytest.approx(model.loss(loader().dataset[:]).item(), rel=1e-5)


@pytest.mark.parametrize("meta", [False, True])
def test_a_checkpoint_loads_without_a_trainer(tmp_path: Path, meta: bool) -> None:
    trained = GPT(**SMALL)
    trainer = quiet_trainer(tmp_path, max_steps=3, enable_checkpointing=False)
    trainer.fit(trained, loader())
    trainer.save_checkpoint(tmp_path / "gpt.ckpt")
    loaded = GPT.load_from_checkpoint(tmp_path / "gpt.ckpt", meta=meta)
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trained.state_dict().items())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 3, or a head_width"):
        GPT(width=64, heads=3)
    with pytest.raises(ConfigError, match="head_width=-1"):
        GPT(head_width=-1)
    with pytest.raises(ConfigError, match="layers=0"):
        GPT(layers=0)
    with pytest.raises(ConfigError, match="learning_rate=-1"):
        GPT(learning_rate=-1)
    with pytest.raises(ConfigError, match=r"betas=\(0\.9, 1\.0\)"):
        GPT(betas=(0.9, 1.0))


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(UsageError, match="sequences of 9 tokens and has positions for 8"):
        build()(torch.zeros(1, 9, dtype=torch.long))
