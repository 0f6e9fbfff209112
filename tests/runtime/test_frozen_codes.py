"""Frozen weights kept in 8 or 4 bits: the numbers are those of a plain loop whose frozen weights were rounded before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.checkpoint_runs import HALF
from kit.checkpoint_runs import fit as run
from kit.outcomes import Outcome
from kit.plain_loop import DTYPES, PlainLoop, fit, make_trainer, tokens
from kit.stacks import VOCABULARY, WIDTH, Stack
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.cli import main
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.quantization import rounded
from lightning_ptm.sharded import load
from lightning_ptm.terms import ALIGN_NUMEL, CODES
from lightning_ptm.trainer.precision import AngelPTMPrecision, LossScale

BATCHES = tokens(3)


class Adapter(nn.Module):
    """A frozen linear layer and LoRA matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, rank, bias=False)
        self.b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class AdaptedBlock(nn.Module):
    """A block whose matrices are frozen; the last of them ends inside a block of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = Adapter(WIDTH, 4 * WIDTH + 3)
        self.down = Adapter(4 * WIDTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Adapted(Stack):
    def __init__(self) -> None:
        super().__init__(3, AdaptedBlock)
        self.embedding.requires_grad_(False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, fused=True)


def rounded_by(code: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter as its codes have it, in its own dtype."""
    flat = value.detach().to(dtype).flatten()
    whole = functional.pad(flat, (0, -flat.numel() % ALIGN_NUMEL))
    return rounded(whole, CODES[code])[: flat.numel()].view(value.shape).to(value.dtype)


def coded(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith("base.weight")


def as_rounded_before(code: str, precision: str) -> Outcome:
    """A plain loop's, whose frozen weights were rounded before."""

    class Rounded(Adapted):
        def __init__(self) -> None:
            super().__init__()
            for name, parameter in self.named_parameters():
                if coded(name):
                    parameter.data = rounded_by(code, parameter, DTYPES[precision])

    plain = PlainLoop(Rounded, precision).run(BATCHES)
    if precision == "bf16-true":  # the loop tells frozen weights as they were built
        plain.weights.update({name: value.bfloat16() for name, value in plain.weights.items()})
    return plain


@pytest.mark.slow_unless(
    "ram-bf16-mixed-int8",
    "masters_on_disk-bf16-true-nf4",
    "all_on_disk-bf16-mixed-int8",
    "three_tiers-bf16-true-nf4",
    "lock_free-32-true-nf4",
    "lock_free_three_tiers-bf16-true-int8",
    "tight-32-true-int8",
    "tight_recomputed-bf16-mixed-nf4",
)
@pytest.mark.parametrize("code", ["int8", "nf4"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_the_numbers_are_those_of_weights_that_were_rounded_before(strategy_at, tier, code, precision) -> None:
    ours = fit(Adapted, BATCHES, strategy_at(tier, frozen_dtype=code), precision)
    ours.assert_equal(as_rounded_before(code, precision))


class Kept(L.Callback):
    """Records the bytes of each parameter's home, and what the inventory has."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AngelPTMStrategy)
        self.homes = {
            slot.spec.name: flat.home.nbytes / flat.layout.padded_numel
            for store in strategy.engine.stores
            for flat in store.flats
            for slot in flat.layout.slots
        }


class Precise(nn.Linear):
    keep_in_fp32 = True


class WithExceptions(Adapted):
    """Frozen matrices in a unit, too, that are looked up, or whose class says that they are precise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].table = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.blocks[0].router = Precise(WIDTH, WIDTH).requires_grad_(False)


@pytest.mark.parametrize(("code", "per_element"), [("int8", 68 / 64), ("nf4", 36 / 64)])
def test_matrices_of_frozen_units_alone_are_coded_and_take_the_bytes_of_their_codes(
    strategy_at, code: str, per_element: float
) -> None:
    kept = Kept()
    fit(WithExceptions, BATCHES, strategy_at("ram", frozen_dtype=code), "32-true", callbacks=[kept])
    assert {name for name, size in kept.homes.items() if size == per_element} == set(filter(coded, kept.homes))
    assert {size for name, size in kept.homes.items() if not coded(name)} == {4.0}


@pytest.mark.slow_unless("bf16-true-three_tiers-ram-int8-sharded")
@pytest.mark.parametrize("kind", ["full", "sharded", "async"])
@pytest.mark.parametrize("code", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("home", "then"), [("ram", "all_on_disk"), ("all_on_disk", "three_tiers"), ("three_tiers", "ram")]
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_checkpoint_holds_the_rounded_values_and_going_on_from_it_changes_no_bit(
    strategy_at, tmp_path: Path, kind: str, code: str, home: str, then: str, precision: str
) -> None:
    saved = {"state_dict_type": "full" if kind == "full" else "sharded", "async_save": kind == "async"}
    settings = {"frozen_dtype": code, "checkpoints": saved}
    once, again = strategy_at(home, **settings), strategy_at(then, **settings)
    never, _ = run(once, tmp_path / "never", build=Adapted, precision=precision)
    checkpoint = tmp_path / "never" / "epoch=0.ckpt"
    held = (load(checkpoint) if kind != "full" else torch.load(checkpoint, weights_only=True))["state_dict"]
    for name, value in never.weights.items():
        assert not coded(name) or torch.equal(held[name], value), name
        assert not coded(name) or torch.equal(rounded_by(code, value, torch.bfloat16), value), name
    resumed, _ = run(again, tmp_path / "again", checkpoint, build=Adapted, precision=precision)
    resumed.assert_equal(Outcome(never.losses[HALF:], never.weights))


class FromMeta(Adapted):
    """Model on the meta device, which only files can initialise."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


@pytest.mark.parametrize("tier", ["ram", "all_on_disk"])
def test_weights_of_files_are_coded_as_they_are_read(strategy_at, tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(Adapted().state_dict(), tmp_path / "model.safetensors")
    strategy = strategy_at(tier, frozen_dtype="nf4", weights=tmp_path / "model.safetensors")
    fit(FromMeta, BATCHES, strategy, "32-true").assert_equal(as_rounded_before("nf4", "32-true"))


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["ram", "masters_on_disk", "three_tiers"])
@pytest.mark.parametrize("code", ["int8", "nf4"])
def test_with_a_loss_scale_adapters_learn_on_the_same_codes(strategy_at, tier: str, code: str) -> None:
    """`16-mixed`: against the same run whose frozen weights were rounded before and are kept as they are."""

    class Rounded(Adapted):
        def __init__(self) -> None:
            super().__init__()
            for name, parameter in self.named_parameters():
                if coded(name):
                    parameter.data = rounded_by(code, parameter, torch.float16)

    def trained(build: type[Adapted], count: int = 8, **settings: Any) -> Outcome:
        plugin = AngelPTMPrecision("16-mixed", LossScale(init_scale=2.0**24))
        return fit(build, tokens(count), strategy_at(tier, **settings), None, plugins=[plugin])  # type: ignore[arg-type]

    ours, theirs = trained(Adapted, frozen_dtype=code), trained(Rounded)
    ours.assert_equal(theirs)
    first, last = trained(Adapted, 1, frozen_dtype=code).weights["head.weight"], ours.weights["head.weight"]
    torch.manual_seed(0)
    assert torch.equal(first, Adapted().head.weight), "the first step overflows"
    assert not torch.equal(first, last)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_what_is_exported_are_the_rounded_values(strategy_at, tmp_path: Path, kind: str) -> None:
    strategy = strategy_at("masters_on_disk", frozen_dtype="nf4", checkpoints={"state_dict_type": kind})
    trained, _ = run(strategy, tmp_path, build=Adapted, precision="bf16-mixed")
    main(["export", str(tmp_path / "last.ckpt"), str(tmp_path / "out")])
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == trained.weights.keys() and any(map(coded, found))
    for name, value in trained.weights.items():
        assert torch.equal(found[name], value), name
        assert not coded(name) or torch.equal(rounded_by("nf4", value, torch.bfloat16), value), name


class Edits(L.Callback):
    """Doubles a frozen weight between two batches, and looks at it there and in the module's state_dict."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            with trainer.strategy.gathered(pl_module.blocks[1]):
                self.before = pl_module.blocks[1].up.base.weight.detach().clone()
                pl_module.blocks[1].up.base.weight.data.add_(self.before.flip(0))
            self.after = pl_module.state_dict()["blocks.1.up.base.weight"].clone()


@pytest.mark.parametrize("tier", ["ram", "three_tiers"])
def test_a_frozen_weight_that_is_edited_is_rounded_again(strategy_at, tier: str) -> None:
    edits = Edits()
    said = r"blocks.1.up.base.weight was edited .* store it as int8: from now on it differs .* by up to [\d.e-]+"
    with pytest.warns(UserWarning, match=said):
        ours = fit(Adapted, BATCHES, strategy_at(tier, frozen_dtype="int8"), "32-true", callbacks=[edits])
    wanted = rounded_by("int8", edits.before + edits.before.flip(0), torch.float32)
    assert not torch.equal(wanted, edits.before)
    assert torch.equal(edits.after, wanted) and torch.equal(ours.weights["blocks.1.up.base.weight"], wanted)


EDITS: dict[str, Callable[[nn.Module], None]] = {
    "an adapter is merged": lambda block: block.up.base.weight.add_(block.up.b.weight @ block.up.a.weight + 0.01),
    "copied from a layer": lambda block: block.up.base.weight.copy_(block.down.base.weight.T.clone() * 0.9 + 0.001),
    "drawn anew": lambda block: nn.init.normal_(block.up.base.weight),
    "one element": lambda block: block.up.base.weight.view(-1)[7].add_(0.3),
    "one row": lambda block: block.up.base.weight[5].copy_(torch.linspace(-1, 1, WIDTH)),
    "pruned": lambda block: block.up.base.weight.mul_(torch.rand(block.up.base.weight.shape).round() + 0.1),
    "elements in other places": lambda block: block.up.base.weight.copy_(
        block.up.base.weight.flatten().roll(9).view_as(block.up.base.weight)
    ),
    "clamped": lambda block: block.up.base.weight.clamp_(-0.0313, 0.0457),
    "loaded": lambda block: block.up.base.load_state_dict(
        {name: each * 1.01 + 0.003 for name, each in block.up.base.state_dict().items()}
    ),
    "by an assignment to data": lambda block: setattr(
        block.up.base.weight, "data", block.up.base.weight.data.sin() + 0.01
    ),
    "as an array": lambda block: block.up.base.weight.detach().numpy().__iadd__(0.0123),
}


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
@pytest.mark.parametrize("edit", EDITS)
def test_whatever_edits_a_frozen_weight_is_told_that_it_is_rounded(strategy_at, edit: str, dtype: str) -> None:
    class Once(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                with trainer.strategy.gathered(pl_module.blocks[1]), torch.no_grad():  # type: ignore[attr-defined]
                    EDITS[edit](pl_module.blocks[1])
                    self.wanted = pl_module.blocks[1].up.base.weight.detach().clone()

    once = Once()
    with pytest.warns(UserWarning, match=f"blocks.1.up.base.weight was edited .* store it as {dtype}"):
        ours = fit(Adapted, BATCHES, strategy_at("all_on_disk", frozen_dtype=dtype), "32-true", callbacks=[once])
    kept = ours.weights["blocks.1.up.base.weight"]
    assert torch.equal(kept, rounded_by(dtype, once.wanted, torch.float32)) and not torch.equal(kept, once.wanted)


class Looks(L.Callback):
    """Has all weights in hand, and edits what codes do not round: an adapter, and one whose codes are exact."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with trainer.strategy.gathered(pl_module):
            pl_module.blocks[0].up.base.weight.data.mul_(2)  # blocks' scales double, and codes stay
            pl_module.head.weight.data.mul_(1.5)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_nothing_is_said_of_what_codes_do_not_round(strategy_at, dtype: str, recwarn: Any) -> None:
    fit(Adapted, BATCHES, strategy_at("ram", frozen_dtype=dtype), "32-true", callbacks=[Looks()])
    assert not [each for each in recwarn if "was edited" in str(each.message)]


class Unfreezes(Adapted):
    """Trains a layer of its second block, whole, from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].down.base.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks[1].down.base.parameters())})


class UnfreezesRounded(Unfreezes):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            if coded(name):
                parameter.data = rounded_by("nf4", parameter, torch.float32)


@pytest.mark.parametrize("tier", ["ram", "all_on_disk"])
def test_what_is_unfrozen_goes_on_from_its_rounded_value(strategy_at, tier: str) -> None:
    ours = fit(Unfreezes, BATCHES, strategy_at(tier, frozen_dtype="nf4"), "32-true", max_epochs=2)
    theirs = fit(UnfreezesRounded, BATCHES, "auto", "32-true", max_epochs=2)  # type: ignore[arg-type]
    ours.assert_equal(theirs)
    assert not torch.equal(ours.weights["blocks.1.down.base.weight"], theirs.weights["blocks.0.down.base.weight"])


class Evaluated(Adapted):
    def validation_step(self, batch: Tensor, index: int) -> None:
        self.losses.append(self.loss(batch, index).detach())


def test_evaluations_compute_with_the_rounded_values_and_training_goes_on_behind_them(strategy_at) -> None:
    torch.manual_seed(0)
    module = Evaluated()
    trainer = make_trainer(strategy_at("ram", frozen_dtype="nf4"), num_sanity_val_steps=1, val_check_interval=1)
    trainer.fit(module, BATCHES.loader(), BATCHES.loader())
    assert all(map(torch.isfinite, module.losses)) and len(module.losses) == 1 + 3 + 3 * 3
    after = {name: value.clone() for name, value in module.state_dict().items()}
    make_trainer(strategy_at("ram", frozen_dtype="nf4")).validate(module, BATCHES.loader(), verbose=False)
    assert torch.equal(torch.stack(module.losses[-3:]), torch.stack(module.losses[-6:-3]))
    assert all(torch.equal(value, after[name]) for name, value in module.state_dict().items())


def test_a_run_without_frozen_matrices_says_that_the_setting_changes_nothing(strategy_at) -> None:
    with pytest.warns(
        UserWarning, match="changes nothing in this run: no matrix of a unit other than the root is frozen"
    ):
        fit(Stack, BATCHES, strategy_at("ram", frozen_dtype="nf4"))


def test_a_code_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="frozen_dtype='fp4': use 'compute', 'int8' or 'nf4'"):
        AngelPTMStrategy(frozen_dtype="fp4")
