"""T5 and T5-MoE give the numbers of Lightning's own strategy, bit for bit, wherever their states live."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.models import T5, T5MoE
from lightning_ptm.models.moe import Router

STEPS = 3
SMALL: dict[str, Any] = {"vocab_size": 64, "width": 64, "layers": 2, "heads": 4, "dropout": 0.1, "warmup_steps": 1}
# Twelve experts for 24 tokens, most of which want the same ones: some have no token, others drop some.
MODELS: dict[str, Any] = {
    "t5": functools.partial(T5, **SMALL),
    "t5_moe": functools.partial(T5MoE, **SMALL, experts=12, feed_forward_width=64),
    "t5_moe_top2": functools.partial(T5MoE, **SMALL, experts=12, feed_forward_width=64, choices=2, gated=True),
}


class Watch(Callback):
    """Keeps each step's loss, and the dtypes that routers and others have in the run."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.router_dtypes: set[torch.dtype] = set()
        self.other_dtypes: set[torch.dtype] = set()

    def on_train_batch_end(self, trainer: Trainer, module: T5, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())
        for owner in module.modules():
            dtypes = self.router_dtypes if isinstance(owner, Router) else self.other_dtypes
            dtypes.update(parameter.dtype for parameter in owner.parameters(recurse=False))


def fused(build: Any) -> T5:
    """Builds the model with the kernel that the strategy uses where `fused` is left open."""
    model: T5 = build()
    configure = model.configure_optimizers

    def with_fused_kernel() -> Any:
        made = configure()
        for group in made["optimizer"].param_groups:  # type: ignore[index,call-overload]
            group["fused"] = True
        return made

    model.configure_optimizers = with_fused_kernel  # type: ignore[method-assign]
    return model


def train(
    model: T5, root: Path, *, strategy: Any = "auto", precision: Any = "32-true"
) -> tuple[list[Tensor], dict[str, Tensor], Watch]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randint(1, 64, (2 * STEPS, 12), generator=generator),
        torch.randint(1, 64, (2 * STEPS, 6), generator=generator),
    )
    watch = Watch()
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy, precision=precision, max_steps=STEPS, default_root_dir=root, callbacks=[watch])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(data, batch_size=2))
    assert len(watch.losses) == STEPS
    return watch.losses, {name: value.detach().clone() for name, value in model.state_dict().items()}, watch


def assert_same(ours: Any, theirs: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True)), (ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    differing = [name for name, value in theirs[1].items() if not torch.equal(ours[1][name], value)]
    assert not differing


@pytest.fixture(scope="module")
def single_device(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Lightning's own strategy in fp32, once a model."""
    return functools.cache(lambda name: train(fused(MODELS[name]), tmp_path_factory.mktemp("single")))


SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "recomputed": {"recompute": "all"},
    "experts": {"units": ["Block", "Expert"]},
    "experts_recomputed": {"units": ["Block", "Expert"], "recompute": "all"},
}


CASES = [
    ("t5", "blocks"),
    ("t5", "recomputed"),
    ("t5_moe", "blocks"),
    ("t5_moe", "recomputed"),
    ("t5_moe", "experts"),
    ("t5_moe", "experts_recomputed"),
    ("t5_moe_top2", "experts"),
]


@pytest.mark.slow_unless(
    "t5-blocks-lock_free", "t5-recomputed-all_on_disk", "t5_moe-blocks-ram", "t5_moe_top2-experts-lock_free"
)
@pytest.mark.parametrize("where", ["ram", "all_on_disk", "lock_free"])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_same_bits_as_on_a_single_device(strategy_at, tmp_path, single_device, where, name, settings) -> None:
    ours = train(MODELS[name](), tmp_path, strategy=strategy_at(where, **SETTINGS[settings]))
    assert_same(ours, single_device(name))


@pytest.mark.slow  # nearly all of it is torch's tracing
def test_compiled_blocks_with_experts_give_the_same_bits(strategy_at, tmp_path, single_device) -> None:
    """Graphs are cut where the loads of experts become numbers."""

    class Compiled(T5MoE):
        def build(self) -> None:
            super().build()
            for block in [*self.encoder.blocks, *self.decoder.blocks]:
                block.compile(backend="eager")

    torch._dynamo.reset()
    arguments = MODELS["t5_moe"].keywords
    ours = train(Compiled(**arguments), tmp_path, strategy=strategy_at("all_on_disk", **SETTINGS["experts_recomputed"]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    assert_same(ours, single_device("t5_moe"))


def test_some_experts_had_no_token(single_device) -> None:
    """The case that the runs above have to survive occurs: an expert without a token in any step is as it was
    initialised."""
    torch.manual_seed(0)
    fresh = MODELS["t5_moe"]()
    fresh.configure_model()
    before = fresh.state_dict()
    _, after, _ = single_device("t5_moe")
    experts = [name for name in before if name.endswith(".expand") and "experts" in name]
    idle = [name for name in experts if torch.equal(before[name], after[name])]
    assert 0 < len(idle) < len(experts)


@pytest.mark.parametrize("settings", ["blocks", "experts_recomputed"])
def test_routers_stay_in_fp32_and_tiers_agree_in_mixed_precision(strategy_at, tmp_path, settings) -> None:
    def run(where: str) -> Any:
        disk = tmp_path / where
        disk.mkdir()
        strategy = strategy_at(where, disk_path=disk, **SETTINGS[settings])
        return train(MODELS["t5_moe"](), tmp_path, strategy=strategy, precision="bf16-mixed")

    in_ram, on_disk = run("ram"), run("three_tiers")
    assert_same(on_disk, in_ram)
    assert in_ram[2].router_dtypes == {torch.float32}
    assert in_ram[2].other_dtypes == {torch.bfloat16}
