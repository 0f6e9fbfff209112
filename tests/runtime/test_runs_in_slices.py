"""Units computed in slices of the batch: numbers, bytes read, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from kit.fits import fit, quiet_trainer
from kit.memory import LEAST, strategy_with
from kit.stacks import Block
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT, T5, T5MoE

SAMPLES, SLICES, LENGTH, WIDTH = 8, 4, 3, 64


class Blocks(L.LightningModule):
    """Blocks and a loss of each number, so that every gradient is that of a block."""

    def __init__(self, dropout: float = 0.0, depth: int = 3, manual: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.losses: list[Tensor] = []
        self.manual = manual
        self.automatic_optimization = not manual

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.detach().clone())
        if self.manual:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            if index % self.manual == self.manual - 1:
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


Wide = partial(Blocks, depth=3, width=256)


def trained(
    build: Any, strategy: Any, samples: int, steps: int = 2, *, accumulate: int = 1, width: int = WIDTH, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(1)
    module = build()
    data = torch.randn(SAMPLES * steps, LENGTH, width, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    fit(
        module,
        DataLoader(TensorDataset(data), batch_size=samples),
        strategy,
        accumulate_grad_batches=accumulate,
        **{"max_epochs": 1, **options},
    )
    return module, {name: each.detach().clone() for name, each in module.state_dict().items()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


HOMES: dict[str, dict[str, Any]] = {
    "RAM": {},
    "tight": {"device_memory": LEAST, "page_size": 65536},
    "disk": {
        "device_memory": LEAST,
        "page_size": 65536,
        "disk_path": "disk",
        "offload_optimizer": "disk",
        "offload_parameters": "disk",
    },
}


def settings_of(home: str, folder: Path) -> dict[str, Any]:
    return {name: folder if name == "disk_path" else value for name, value in HOMES[home].items()}


@pytest.mark.parametrize("home", HOMES)
def test_gradients_are_those_of_as_many_batches_accumulated(home: str, tmp_path: Path) -> None:
    _, expected = trained(Blocks, "auto", SAMPLES // SLICES, accumulate=SLICES)
    ours, found = trained(Blocks, strategy_with(slices=SLICES, **settings_of(home, tmp_path)), SAMPLES)
    assert_equal(found, expected)
    whole, _ = trained(Blocks, "auto", SAMPLES)
    torch.testing.assert_close(ours.losses, whole.losses)  # of the whole batch


def test_manual_optimization_and_accumulated_batches(tmp_path: Path) -> None:
    for build in (lambda: Blocks(manual=2), lambda: Plain(manual=2)), (Blocks, Plain):
        accumulate = 2 if build[0] is Blocks else 1
        strategy = strategy_with(slices=SLICES, **settings_of("disk", tmp_path))
        _, found = trained(build[0], strategy, SAMPLES, 4, accumulate=accumulate)
        _, expected = trained(build[1], "auto", SAMPLES, 4, accumulate=accumulate)
        assert_equal(found, expected)


class Read(L.Callback):
    """Bytes of parameters read from disk in each micro-batch."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._before = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = trainer.strategy.statistics().links["disk_to_device"].bytes  # states go to RAM
        self.bytes.append(now - self._before)
        self._before = now


def reads(folder: Path, samples: int, slices: int = 1, accumulate: int = 1) -> float:
    """How often the second of three steps reads each byte of the parameters from disk."""
    read = Read()
    strategy = strategy_with(slices=slices, **settings_of("disk", folder))
    trained(Wide, strategy, samples, 3, accumulate=accumulate, width=256, callbacks=[read])
    return sum(read.bytes[accumulate : 2 * accumulate]) / (4 * sum(each.numel() for each in Wide().parameters()))


def test_a_unit_is_fetched_twice_a_step_however_many_slices_there_are(tmp_path: Path) -> None:
    assert reads(tmp_path, SAMPLES, slices=8) <= 2.1
    assert reads(tmp_path, 1, accumulate=8) > 8


class InSlices(nn.Module):
    """A block that a plain run computes in the order of a sliced one."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        found = [self.block(each) for each in reversed(x.split(SAMPLES // SLICES))]
        return torch.cat(found[::-1])


class Plain(Blocks):
    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = InSlices(block)(x)
        return x.float().pow(2).mean()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("activations", ["none", "disk"])
def test_each_slice_draws_its_own_random_numbers_and_repeats_them(
    precision: str, activations: str, tmp_path: Path
) -> None:
    _, expected = trained(lambda: Plain(dropout=0.2), "auto", SAMPLES, precision=precision)
    strategy = strategy_with(slices=SLICES, **settings_of("disk", tmp_path) | {"offload_activations": activations})
    _, found = trained(lambda: Blocks(dropout=0.2), strategy, SAMPLES, precision=precision)
    assert_equal(found, expected)


def test_clipping(tmp_path: Path) -> None:
    found, expected = (
        trained(build, strategy, SAMPLES, gradient_clip_val=1e-3)[1]
        for build, strategy in (
            (Blocks, strategy_with(slices=SLICES, **settings_of("disk", tmp_path))),
            (Plain, "auto"),
        )
    )
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name])


class Normed(Blocks):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(LENGTH)


def test_a_unit_in_which_samples_meet_is_refused_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"blocks.0 \(Block\) cannot be computed in slices of the batch"):
        trained(Normed, strategy_with(slices=SLICES), SAMPLES)
    trained(Normed, strategy_with(slices={"blocks.*": 1}), SAMPLES)


def test_lock_free_runs(tmp_path: Path) -> None:
    lock_free = {"lock_free": {"max_staleness": 0}, "disk_path": tmp_path, "page_size": 65536}
    _, found = trained(Blocks, strategy_with(slices=SLICES, **lock_free), SAMPLES)
    assert_equal(found, trained(Plain, "auto", SAMPLES)[1])


def test_compiled_units_in_slices(tmp_path: Path) -> None:
    class Compiled(Blocks):
        def configure_model(self) -> None:
            for block in self.blocks:
                block.compile(backend="eager")

    _, found = trained(Compiled, strategy_with(slices=SLICES, **settings_of("disk", tmp_path)), SAMPLES)
    assert_equal(found, trained(Plain, "auto", SAMPLES)[1])


class Attending(nn.Module):
    """A block with an MLP that computes each token alone, after attention that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + nn.functional.scaled_dot_product_attention(self.query(x), x, x)
        return x + self.mlp(x)


class Texts(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(3))

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "none"},
        {"recompute": "all"},
        {"recompute": "auto", "offload_activations": "disk"},
        {"slices": {"blocks.*": 2}},
        {"slices": {"blocks.*": 2, "auto": ("tokens", 3)}},
        {"lock_free": {"max_staleness": 0}, "offload_parameters": "auto"},
    ],
    ids=str,
)
def test_modules_inside_of_units_on_slices_of_their_tokens(settings: dict[str, Any], tmp_path: Path) -> None:
    def double() -> Any:
        return Texts().double()

    _, expected = trained(double, "auto", SAMPLES, precision="64-true")
    slices = settings.get("slices", {})
    slices |= {} if "auto" in slices else {"*.mlp": ("tokens", 2)}
    strategy = strategy_with(**settings_of("disk", tmp_path) | settings | {"slices": slices})
    _, found = trained(double, strategy, SAMPLES, precision="64-true")
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=0, atol=1e-12, msg=name)


@dataclasses.dataclass
class Output:
    hidden: Tensor


class GatedMLP(nn.Module):
    """Returns an object, so it is called as a whole; a sigmoid's node saves its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        found = self.gate(x)
        return Output(self.down(found * found.sigmoid()))


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x).hidden  # type: ignore[no-any-return]


class GatedTexts(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(3))


def test_modules_that_a_trial_leaves_whole_in_the_least_memory(tmp_path: Path) -> None:
    strategy = strategy_with(slices={"auto": ("tokens", 3)}, **settings_of("tight", tmp_path))
    _, found = trained(GatedTexts, strategy, SAMPLES)
    assert_equal(found, trained(GatedTexts, "auto", SAMPLES)[1])


@pytest.mark.slow
def test_compiled_modules_on_slices_of_their_tokens(tmp_path: Path) -> None:
    class Compiled(Texts):
        def configure_model(self) -> None:
            self.double()
            for block in self.blocks:
                block.mlp.compile(backend="eager")

    strategy = strategy_with(slices={"*.mlp": ("tokens", 3)}, **settings_of("disk", tmp_path))
    _, found = trained(Compiled, strategy, SAMPLES, precision="64-true")
    _, expected = trained(lambda: Texts().double(), "auto", SAMPLES, precision="64-true")
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=0, atol=1e-12, msg=name)


class Dropping(Texts):
    """With dropout and frozen MLPs, which have PEFT's adapters."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.2))
        config = peft.LoraConfig(r=4, target_modules=["mlp.1", "mlp.3"], init_lora_weights=False)
        self.blocks = peft.inject_adapter_in_model(config, self.blocks)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        torch.manual_seed(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


def test_modules_found_by_a_trial_in_a_run_that_is_resumed_in_the_middle(tmp_path: Path) -> None:
    settings = settings_of("disk", tmp_path) | {"slices": {"auto": ("tokens", 3)}, "offload_activations": "disk"}
    _, expected = trained(Dropping, strategy_with(**settings), SAMPLES, 1, max_epochs=4)
    data = DataLoader(
        TensorDataset(torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))), SAMPLES
    )
    torch.manual_seed(1)
    calls: list[int] = []
    half = Dropping()
    for block in half.blocks:
        block.mlp[2].register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    fit(half, data, strategy_with(**settings), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    assert calls[-3:] == [1] * 3  # each of three tokens; what the hook wrote when they were computed again is undone
    module = Dropping()
    quiet_trainer(strategy_with(**settings), max_epochs=4).fit(module, data, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(module.state_dict(), expected)


class Adapted(Blocks):
    """Frozen blocks with PEFT's adapters."""

    def __init__(self) -> None:
        super().__init__()
        config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
        self.blocks = peft.inject_adapter_in_model(config, self.blocks)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2, fused=True)


class PlainAdapted(Adapted):
    loss = Plain.loss


def test_adapters_of_peft(tmp_path: Path) -> None:
    _, found = trained(Adapted, strategy_with(slices=SLICES, **settings_of("disk", tmp_path)), SAMPLES)
    assert_equal(found, trained(PlainAdapted, "auto", SAMPLES)[1])


class Resumed(Blocks):
    """Draws the same dropout in a step whether or not the run was resumed before it."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        torch.manual_seed(self.trainer.global_step)


def test_a_run_that_is_resumed_in_the_middle(tmp_path: Path) -> None:
    settings = settings_of("disk", tmp_path) | {"slices": SLICES}
    build = partial(Resumed, dropout=0.2)
    _, expected = trained(build, strategy_with(**settings), SAMPLES, 1, max_epochs=4)
    data = DataLoader(
        TensorDataset(torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))), SAMPLES
    )
    torch.manual_seed(1)
    fit(build(), data, strategy_with(**settings), max_epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    module = build()
    quiet_trainer(strategy_with(**settings), max_epochs=4).fit(module, data, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(module.state_dict(), expected)


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*(torch.randint(0, 64, (2 * SAMPLES, 8), generator=generator) for _ in range(2)))


@pytest.mark.parametrize("model", [GPT, T5])
def test_our_models_are_those_of_the_whole_batch(model: Any, tmp_path: Path) -> None:
    def build() -> Any:
        sizes = {"vocab_size": 64, "width": 64, "layers": 2, "heads": 4, "warmup_steps": 1, "dropout": 0.0}
        return model(**sizes).double()

    found = []
    for strategy in strategy_with(slices=SLICES, **settings_of("disk", tmp_path)), "auto":
        torch.manual_seed(1)
        module = build()
        fit(module, DataLoader(texts(), batch_size=SAMPLES), strategy, max_epochs=1, precision="64-true")
        found.append(dict(module.state_dict()))
    for name, each in found[0].items():
        torch.testing.assert_close(each, found[1][name], rtol=0, atol=1e-10, msg=name)


def test_a_routers_balance_loss_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = T5MoE(vocab_size=64, width=64, layers=2, heads=4, experts=4, feed_forward_width=64)
    with pytest.raises(ConfigError, match=r"\.\d+ \(\w+\) cannot be computed in slices of the batch"):
        fit(module, DataLoader(texts(), batch_size=SAMPLES), strategy_with(slices=SLICES), max_epochs=1)
