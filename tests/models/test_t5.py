"""T5 and T5-MoE by themselves: what they may see, how they start, what they refuse, and the steps that a Trainer calls."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kit.fits import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import ConfigError
from lightning_ptm.models import T5, T5MoE
from lightning_ptm.models.t5 import PAD, RelativePosition, shifted

SMALL = {"vocab_size": 32, "width": 16, "layers": 2, "heads": 2}


def build(kind: type[T5] = T5, **changes: object) -> T5:
    model = kind(**(SMALL | changes))  # type: ignore[arg-type]
    model.configure_model()
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 32, (4, 9), generator=generator), torch.randint(1, 32, (4, 6), generator=generator)


def test_a_target_sees_all_input_and_no_later_target() -> None:
    model = build()
    tokens, targets = batch()
    before = model(tokens, shifted(targets))
    assert before.shape == (4, 6, 32)
    later = targets.clone()
    later[:, 3] = (later[:, 3] + 1) % 32
    after = model(tokens, shifted(later))
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.equal(before[:, 4], after[:, 4])
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 32
    assert (model(other, shifted(targets)) != before).any(dim=-1).all()


def test_padded_input_is_not_seen() -> None:
    model = build()
    tokens, targets = batch()
    longer = F.pad(tokens, (0, 3), value=PAD)
    padding = torch.arange(12).expand(4, 12) >= 9
    torch.testing.assert_close(model(longer, shifted(targets), padding), model(tokens, shifted(targets)))


def test_padded_targets_are_left_out_of_the_loss() -> None:
    model = build()
    tokens, targets = batch()
    padded = F.pad(targets, (0, 2), value=PAD)
    torch.testing.assert_close(model.loss((tokens, padded)), model.loss((tokens, targets)))
    assert model.token_count((tokens, padded)) == targets.numel()
    torch.testing.assert_close(model.predict_step((tokens, padded), 0).mean(), model.loss((tokens, targets)))


def test_blocks_of_a_stack_share_one_bias() -> None:
    names = [name for name, _ in build(layers=3).named_parameters() if "position" in name]
    assert names == ["encoder.position.embedding.weight", "decoder.position.embedding.weight"]


def test_buckets_are_exact_near_by_and_all_used() -> None:
    position = RelativePosition(1, 32, 128, bidirectional=True)
    distances = torch.arange(-300, 301)
    buckets = position.bucket(distances)
    assert set(buckets.tolist()) == set(range(32)) - {16}  # no key is later by 0
    assert torch.equal(position.bucket(torch.arange(-7, 1)), torch.arange(7, -1, -1))
    assert torch.equal(position.bucket(torch.arange(1, 8)), torch.arange(17, 24))
    assert position.bucket(torch.tensor([-128, -1000])).tolist() == [15, 15]
    one_way = RelativePosition(1, 32, 128, bidirectional=False)
    assert one_way.bucket(torch.tensor([5, 0, -15])).tolist() == [0, 0, 15]


def expected_std(model: T5, name: str) -> float:
    """Returns the standard deviation of Mesh TensorFlow's T5; for T5MoE, that of Switch Transformers' truncated
    normal."""
    width, inner = model.width, model.feed_forward_width
    if name == "embedding.weight":
        return 1.0
    inputs = {"key_value": width, "expand": width, "gate": width, "embedding": width, "router": width}
    inputs |= {"query": width * model.head_width}
    inputs |= {"project": inner if "feed_forward" in name else model.heads * model.head_width}
    (found,) = {inputs[part] for part in name.split(".") if part in inputs}
    if isinstance(model, T5MoE):
        # Cut at two standard deviations, a normal has 0.8796 of its own.
        return 0.8796 * math.sqrt(0.1 / found)
    return 1.0 / math.sqrt(found)


def check_initialisation(model: T5) -> None:
    assert model.head.weight is model.embedding.weight
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        expected = expected_std(model, name)
        tolerance = 5 * expected / math.sqrt(2 * parameter.numel())
        assert abs(parameter.std().item() - expected) < tolerance, name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel()), name


@pytest.mark.parametrize("kind", [T5, T5MoE])
def test_eager_and_meta_builds_are_initialised_as_published(kind: type[T5]) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "width": 48, "head_width": 16, "gated": True}
    check_initialisation(build(kind, **sizes))
    late = build(kind, **sizes, meta=True)
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    late.head.weight = late.embedding.weight
    with torch.no_grad():
        for parameter in late.parameters():
            parameter.fill_(math.nan)
    for module in reversed(list(late.modules())):  # any order must do: the strategy has its own
        late.init_weights(module)
    check_initialisation(late)


def test_experts_are_in_every_other_block() -> None:
    model = build(T5MoE, layers=5)
    for stack in (model.encoder, model.decoder):
        kinds = [type(block.feed_forward).__name__ for block in stack.blocks]
        assert kinds == ["FeedForward", "MixtureOfExperts", "FeedForward", "MixtureOfExperts", "FeedForward"]


def test_the_training_loss_has_the_balance_of_each_layer_and_evaluation_has_not(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*batch()), batch_size=4)
    model = build(T5MoE, jitter=0.0, balance_weight=0.5, learning_rate=0.0, eval_capacity_factor=1.25)
    with torch.no_grad():
        loss, routings = model.loss_and_routings(batch())
    assert len(routings) == 2
    with pytest.warns(UserWarning, match="not registered"):
        total = model.training_step(batch(), 0)
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1)
    trainer.fit(model, loader)
    logged = trainer.callback_metrics
    assert logged["train_loss"].item() == pytest.approx(loss.item())
    balance = sum(routing.balance_loss.item() for routing in routings)
    assert logged["moe/balance_loss"].item() == pytest.approx(balance / 2)
    assert logged["moe/load_entropy"].item() == pytest.approx(sum(r.load_entropy.item() for r in routings) / 2)
    assert logged["moe/dropped"].item() == pytest.approx(sum(r.dropped_fraction.item() for r in routings) / 2)
    assert total.item() == pytest.approx(loss.item() + 0.5 * balance)
    assert model.eval().loss(batch()).item() == pytest.approx(loss.item())


@pytest.mark.parametrize("kind", [T5, T5MoE])
@pytest.mark.parametrize("meta", [False, True])
def test_a_checkpoint_loads_without_a_trainer(tmp_path: Path, kind: type[T5], meta: bool) -> None:
    trained = kind(**SMALL)  # type: ignore[arg-type]
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=2)
    trainer.fit(trained, DataLoader(TensorDataset(*batch()), batch_size=2))
    trainer.save_checkpoint(tmp_path / "t5.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "t5.ckpt", meta=meta)
    assert loaded.state_dict().keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trained.state_dict().items())


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 3, or a head_width"):
        T5(width=64, heads=3)
    with pytest.raises(ConfigError, match="layers=0"):
        T5(layers=0)
    with pytest.raises(ConfigError, match="buckets=6"):
        T5(buckets=6)
    with pytest.raises(ConfigError, match="at least 2 experts"):
        T5MoE(experts=1)
    with pytest.raises(ConfigError, match="choices=3"):
        T5MoE(choices=3)
    with pytest.raises(ConfigError, match="at least 2 layers"):
        T5MoE(layers=1)
    with pytest.raises(ConfigError, match="jitter=1"):
        T5MoE(jitter=1.0)


def test_only_matrices_decay(tmp_path: Path) -> None:
    model = T5(**SMALL, weight_decay=0.3)  # type: ignore[arg-type]
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1)
    trainer.fit(model, DataLoader(TensorDataset(*batch()), batch_size=2))
    decayed, plain = trainer.optimizers[0].param_groups
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    norms = {id(module.weight) for module in model.modules() if isinstance(module, nn.RMSNorm)}
    assert {id(parameter) for parameter in plain["params"]} == norms
