"""Runs that go on from a checkpoint whose dtype is not the module's before the run: every run of `bf16-true`, among others.

A plain Trainer loads the weights into the module before it converts that, and hooks and configure_optimizers see them there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import Twin, assert_alike, quietly, trainer, vectors
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import UsageError


class PerturbsInConfigureOptimizers(Twin):
    def configure_optimizers(self) -> Any:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)
        return super().configure_optimizers()


class LoadPreHook(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Tensor], *_: Any) -> None:
        state.update({name: value * 0.5 for name, value in state.items()})


class LoadPostHook(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self._halve)

    @staticmethod
    def _halve(module: nn.Module, keys: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)


class OverriddenLoad(Twin):
    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name: value * 0.5 for name, value in state.items()}, *args, **kwargs)


class Anchored(Twin):
    """L2 towards the weights that fine-tuning began with."""

    def configure_optimizers(self) -> Any:
        self.anchors = [parameter.detach().clone().double() for parameter in self.parameters()]
        return super().configure_optimizers()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        pairs = zip(self.parameters(), self.anchors, strict=True)
        total = loss + sum((each.double() - anchor).square().sum() for each, anchor in pairs).to(loss.dtype)  # type: ignore[union-attr]
        self.losses[-1] = total.detach().clone()
        return total


class EditsData(Callback):
    def on_load_checkpoint(self, _trainer: Any, module: Any, checkpoint: Any) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(0.5)


class EditsInPlace(Callback):
    def on_load_checkpoint(self, _trainer: Any, module: Any, checkpoint: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)


def checkpoint_of(path: Path, precision: Any, kind: type[Twin] = Twin) -> Path:
    """Saves the checkpoint of a plain Trainer after an epoch."""
    with quietly():
        torch.manual_seed(3)
        plain = trainer(precision=precision)
        plain.fit(kind(), vectors())
        plain.save_checkpoint(path)
    return path


def resumed(
    kind: type[Twin], strategy: Any, path: Path, callback: type[Callback] | None = None, **options: Any
) -> Twin:
    with quietly():
        torch.manual_seed(9)
        module = kind()
        callbacks = [callback()] if callback is not None else []
        chosen = trainer(strategy, max_epochs=2, callbacks=callbacks, **options)
        chosen.fit(module, vectors(), ckpt_path=path, weights_only=False)
    return module


EDITS: list[tuple[type[Twin], type[Callback] | None]] = [
    (PerturbsInConfigureOptimizers, None),
    (LoadPreHook, None),
    (LoadPostHook, None),
    (OverriddenLoad, None),
    (Twin, EditsData),
    (Twin, EditsInPlace),
]


READS: list[tuple[type[Twin], None]] = [(Twin, None), (Anchored, None)]


@pytest.mark.diagonal
@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
@pytest.mark.parametrize(
    ("saved", "goes_on", "kind", "callback"),
    [
        *(
            ("bf16-true", goes_on, *of)
            for goes_on in ("bf16-true", "32-true")
            for of in [*EDITS, (Twin, None), (Anchored, None)]
        ),
        # What nobody has edited is not rounded to the module's dtype there, as it is by a plain Trainer.
        *(("64-true", "64-true", *of) for of in EDITS),
    ],
)
def test_what_is_done_to_loaded_weights_counts(
    kind: type[Twin],
    callback: type[Callback] | None,
    saved: str,
    goes_on: str,
    home: str,
    strategy_at: MakeStrategy,
    tmp_path: Path,
) -> None:
    path = checkpoint_of(tmp_path / "x.ckpt", saved)
    ours = resumed(kind, strategy_at(home, tuning={"matmul_precision": "native"}), path, callback, precision=goes_on)
    assert_alike(ours, resumed(kind, None, path, callback, precision=goes_on))


@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
def test_no_precision_is_lost_by_going_on(home: str, strategy_at: MakeStrategy, tmp_path: Path) -> None:
    """A plain Trainer loads a checkpoint of `64-true` into a module that is still fp32; ours goes on as if without an end."""
    ours = resumed(Twin, strategy_at(home), checkpoint_of(tmp_path / "x.ckpt", "64-true"), precision="64-true")
    with quietly():
        torch.manual_seed(3)
        whole = Twin()
        trainer(max_epochs=2, precision="64-true").fit(whole, vectors())
    assert all(map(torch.equal, ours.losses, whole.losses[-len(ours.losses) :])) and len(ours.losses) == 3
    pairs = zip(ours.parameters(), whole.parameters(), strict=True)
    assert all(one.dtype is torch.float64 and torch.equal(one, other) for one, other in pairs)


def test_a_float16_run_goes_on(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "x.ckpt", "bf16-true")  # a CPU's plain Trainer has no 16-true
    state = torch.load(path, weights_only=False)
    state["state_dict"] = {name: value.half() for name, value in state["state_dict"].items()}
    torch.save(state, path)
    ours = resumed(PerturbsInConfigureOptimizers, strategy_at("ram"), path)
    assert_alike(ours, resumed(PerturbsInConfigureOptimizers, None, path))


# -- without storage: what would be lost is refused ------------------------------------------------------------------------


def built_on_meta(kind: type[Twin]) -> type[Twin]:
    class OnMeta(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            with torch.device("meta"):
                super().__init__()

    return OnMeta


class Reads(Twin):
    """Renames nothing and changes nothing, but looks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda _module, state, *_: self.seen.extend(state))
        self.seen: list[str] = []


@pytest.mark.parametrize("kind", [Twin, Reads])
def test_weights_on_the_meta_device_get_the_checkpoints(
    kind: type[Twin], strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    path = checkpoint_of(tmp_path / "x.ckpt", "32-true")
    assert_alike(resumed(built_on_meta(kind), strategy_at("ram"), path), resumed(Twin, None, path))


@pytest.mark.parametrize(
    ("kind", "callback", "match"),
    [
        (LoadPreHook, None, r"stem.weight.* changed by a hook or an override of load_state_dict .*on_load_checkpoint"),
        (LoadPostHook, None, r"stem.weight.* changed by a hook"),
        (OverriddenLoad, None, r"stem.weight.* changed by a hook"),
        (
            Twin,
            EditsInPlace,
            r"stem.weight.* written to on the meta device, between the loading of a checkpoint and the start of the run",
        ),
        (
            PerturbsInConfigureOptimizers,
            None,
            r"stem.weight.* written to on the meta device, between the loading of a checkpoint",
        ),
    ],
)
def test_changes_to_weights_without_storage_are_refused(
    kind: type[Twin], callback: type[Callback] | None, match: str, strategy_at: MakeStrategy, tmp_path: Path
) -> None:
    path = checkpoint_of(tmp_path / "x.ckpt", "32-true")
    with pytest.raises(UsageError, match=match):
        resumed(built_on_meta(kind), strategy_at("ram"), path, callback)


class PartlyOnMeta(Twin):
    """A block without storage among others; a buffer that is halved."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        with torch.device(device):
            self.blocks[1] = nn.Linear(66, 66)
        self.register_buffer("scale", torch.ones(66))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](torch.tanh(self.stem(x))) * self.scale)  # type: ignore[no-any-return]

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"]["scale"] = checkpoint["state_dict"]["scale"] * 3


class EditsWhatIsThere(Callback):
    def on_load_checkpoint(self, _trainer: Any, module: Any, checkpoint: Any) -> None:
        with torch.no_grad():
            module.stem.weight.mul_(0.5)
            module.scale.mul_(0.5)


class WhollyThere(PartlyOnMeta):
    def __init__(self) -> None:
        super().__init__("cpu")


def test_what_has_storage_is_loaded_at_once_beside_what_has_none(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "x.ckpt", "32-true", WhollyThere)
    ours = resumed(PartlyOnMeta, strategy_at("ram"), path, EditsWhatIsThere)
    assert_alike(ours, resumed(WhollyThere, None, path, EditsWhatIsThere))


def test_a_hook_that_changes_values_is_refused_where_pages_hold_them(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path / "x.ckpt", "32-true")

    class LoadsInMidRun(LoadPreHook):
        def on_train_epoch_start(self) -> None:
            self.trainer.strategy.load_model_state_dict(torch.load(path, weights_only=False))

    with quietly(), pytest.raises(UsageError, match=r"stem.weight.* changed by a hook"):
        trainer(strategy_at("all_on_disk")).fit(LoadsInMidRun(), vectors())


class Wide(Twin):
    """A block has more than a page of 64-bit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(66, 130), nn.Linear(130, 66)) for _ in range(2))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_what_a_run_of_64_bits_has_on_disk_is_saved(strategy_at: MakeStrategy, kind: str, tmp_path: Path) -> None:
    def resumed(path: Path, make: Callable[[], AngelPTMStrategy]) -> Twin:
        with quietly():
            torch.manual_seed(0)
            saves = ModelCheckpoint(path, every_n_train_steps=3)
            ran = trainer(make(), precision="64-true", enable_checkpointing=True, callbacks=[saves])
            ran.fit(Wide(), vectors())
            after = Wide()
            trainer(make(), precision="64-true", max_epochs=2).fit(after, vectors(), ckpt_path=saves.best_model_path)
        return after

    on_disk = resumed(tmp_path / "saved", lambda: strategy_at("masters_on_disk", checkpoints={"state_dict_type": kind}))
    assert_alike(
        on_disk, resumed(tmp_path / "ram", lambda: strategy_at("ram", checkpoints={"state_dict_type": "full"}))
    )
