"""Code that works with a plain Trainer between and around steps, and does not by itself with pages: each with the plain
numbers, or refused with the reason."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.judged import little_ram
from kit.models import Block
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ptm import ConfigError, UsageError
from lightning_ptm.sharded import ShardedCheckpointIO, to_file

State = dict[str, Tensor]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(Block(48) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def batches(count: int = 3) -> DataLoader[Any]:
    rows = torch.randn(4 * count, 48, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def trainer_with(strategy: Any, **options: Any) -> L.Trainer:
    chosen = {"num_sanity_val_steps": 0, "max_epochs": 1, "precision": "32-true"}
    return quiet_trainer(strategy, **{**chosen, **options})


def weights_of(module: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def fitted(build: Callable[[], Net], strategy: Any, **options: Any) -> Net:
    module = build()
    trainer_with(strategy, **options).fit(module, batches())
    return module


def assert_same(ours: State, theirs: State) -> None:
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


# -- a unit's calls --------------------------------------------------------------------------------------------------------


class Again(Net):
    """Each block is called under a reentrant checkpoint and without one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        for block in self.blocks:
            x = block(x)
        return x


class Between(Net):
    """Calls each block with and without activation checkpointing by turns, and with both kinds of checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, block(x), use_reentrant=True)
            x = block(checkpoint(block, x, use_reentrant=False))
        return x


class Taught(Net):
    """Each block computes a target without gradients first, which nobody computes again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) - target.detach() / 2


class Twice(Net):
    """Two reentrant calls of each block in one graph, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.slow_unless(
    "masters_on_disk-Twice", "lock_free-Between", "tight_recomputed-Again", "tight_recomputed-Taught"
)
@pytest.mark.parametrize("build", [Again, Between, Taught, Twice])
def test_calls_of_several_kinds(strategy_at: Any, tier: str, build: type[Net]) -> None:
    assert_same(weights_of(fitted(build, strategy_at(tier))), weights_of(fitted(build, "auto")))


class Derived(Net):
    """Takes a derivative of torch.func with regard to its input, in the step or behind it."""

    inside = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def _derive(self) -> None:
        batch = torch.linspace(-1, 1, 96).view(2, 48)
        self.found.append(torch.func.grad(lambda x: self(x).square().mean())(batch))
        self.found += torch.func.jvp(self, (batch,), (torch.ones_like(batch),))
        self.found.append(torch.func.vmap(lambda x: self(x[None]).sum())(batch).detach())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.inside:
            self._derive()
        return super().training_step(batch, index)

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.inside:
            self._derive()


class DerivedBetween(Derived):
    inside = False


@pytest.mark.parametrize("build", [Derived, DerivedBetween])
def test_derivatives_of_torch_func_in_ram(strategy_at: Any, build: type[Derived]) -> None:
    ours, theirs = fitted(build, strategy_at("ram")), fitted(build, "auto")
    assert_same(weights_of(ours), weights_of(theirs))
    assert all(torch.equal(a, b) for a, b in zip(ours.found, theirs.found, strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("build", [Derived, DerivedBetween])
@pytest.mark.parametrize(
    "home", ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "lock_free_three_tiers"]
)
def test_derivatives_of_torch_func_elsewhere_are_refused(strategy_at: Any, home: str, build: type[Derived]) -> None:
    with pytest.raises(UsageError, match=r"a derivative of torch.func .*use torch.autograd.grad\(output, inputs\)"):
        fitted(build, strategy_at(home))


class Mapped(Net):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return torch.func.vmap(lambda x: self(x).square().mean())(batch[:, None]).mean()


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_vmap(strategy_at: Any, tier: str) -> None:
    assert_same(weights_of(fitted(Mapped, strategy_at(tier))), weights_of(fitted(Mapped, "auto")))


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


class LazyNoMore(Lazy):
    def configure_model(self) -> None:
        if self.last.has_uninitialized_params():
            with torch.no_grad():
                self(torch.ones(1, 48))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_lazy_modules(strategy_at: Any, tier: str) -> None:
    with pytest.raises(ConfigError, match=r"last.weight gets its shape in the first forward .* in configure_model"):
        fitted(Lazy, strategy_at(tier))


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_lazy_modules_that_know_their_shapes(strategy_at: Any, tier: str) -> None:
    assert_same(weights_of(fitted(LazyNoMore, strategy_at(tier))), weights_of(fitted(LazyNoMore, "auto")))


# -- between runs ----------------------------------------------------------------------------------------------------------


def _checkpoint_of_another() -> dict[str, Any]:
    trainer = trainer_with("auto")
    trainer.fit(Net(), batches(2))
    return trainer._checkpoint_connector.dump_checkpoint()


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_loading_between_runs(strategy_at: Any, tier: str) -> None:
    """Weights and the optimizer's states, which a checkpoint then has."""
    given = _checkpoint_of_another()
    saved = []
    for strategy in (strategy_at(tier), "auto"):
        trainer = trainer_with(strategy)
        trainer.fit(Net(), batches())
        trainer.strategy.load_model_state_dict(copy.deepcopy(given))
        trainer.strategy.load_optimizer_state_dict(copy.deepcopy(given))
        saved.append(trainer._checkpoint_connector.dump_checkpoint())
    ours, theirs = saved
    assert_same(ours["state_dict"], theirs["state_dict"])
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
    for place, state in theirs["optimizer_states"][0]["state"].items():
        assert_same(ours["optimizer_states"][0]["state"][place], state)


class Stops(Net):
    """An error of the user's behind the second step."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            raise ValueError("enough")


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("in_ram", [True, False])
def test_a_checkpoint_after_an_exception(
    strategy_at: Any, tier: str, kind: str, in_ram: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole where RAM has room for all of it, as after a run that went well; a training goes on from it as from a plain
    one's."""
    resumed = []
    if not in_ram:
        if tier == "ram":
            return
        little_ram(monkeypatch, Net())
    for name, make in (
        ("ours", lambda: strategy_at(tier, checkpoints={"state_dict_type": kind})),
        ("theirs", lambda: "auto"),
    ):
        trainer = trainer_with(make())
        with pytest.raises(ValueError, match="enough"):
            trainer.fit(Stops(), batches())
        if not in_ram and name == "ours":
            with pytest.raises(UsageError, match=r"save_checkpoint\(..., weights_only=True\)"):
                trainer.save_checkpoint(tmp_path / name)
        trainer.save_checkpoint(tmp_path / name, weights_only=not in_ram)
        module = Net()
        if in_ram:
            trainer_with(make(), max_epochs=2).fit(module, batches(), ckpt_path=tmp_path / name, weights_only=False)
        else:
            path = tmp_path / name
            if path.is_dir():
                path = tmp_path / "one"
                to_file(tmp_path / name, path)
            module.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        resumed.append(weights_of(module))
    assert_same(*resumed)


class Forgotten(Net):
    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)

    path: Path


@pytest.mark.parametrize("home", ["ram", "all_on_disk", "lock_free"])
def test_weights_that_a_run_did_not_put_back(strategy_at: Any, home: str, tmp_path: Path) -> None:
    """Weights that were not restored raise when they are read; a run without a checkpoint is refused, one with it
    continues, and the weights can be loaded."""
    module = Forgotten()
    module.path = tmp_path / "x.ckpt"
    trainer_with(strategy_at(home, tuning={"restore_weights": False})).fit(module, batches())
    with pytest.raises(UsageError, match=r"first.weight was read or written, and its values ended with its run"):
        module.first.weight.sum()
    with pytest.raises(
        UsageError, match=r"the values of first.weight.* ended with an earlier run.* give it a ckpt_path"
    ):
        trainer_with(strategy_at(home)).fit(module, batches())
    trainer = trainer_with(strategy_at(home, tuning={"restore_weights": False}), max_epochs=2)
    trainer.fit(module, batches(), ckpt_path=module.path, weights_only=True)
    trainer.strategy.load_model_state_dict(torch.load(module.path))
    theirs = fitted(Net, "auto", max_epochs=2)
    assert_same(weights_of(module), weights_of(theirs))


@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
def test_a_plain_trainer_reads_sharded_checkpoints(strategy_at: Any, home: str, tmp_path: Path) -> None:
    module = Forgotten()
    module.path = tmp_path / "folder.ckpt"
    trainer_with(strategy_at(home, checkpoints={"state_dict_type": "sharded"})).fit(module, batches())
    to_file(module.path, tmp_path / "file.ckpt")
    assert_same(weights_of(Net.load_from_checkpoint(tmp_path / "file.ckpt")), weights_of(module))
    theirs = weights_of(fitted(Net, "auto", max_epochs=2))
    for path in (module.path, tmp_path / "file.ckpt"):
        later = Net()
        plain = trainer_with("auto", max_epochs=2, plugins=[ShardedCheckpointIO()])
        plain.fit(later, batches(), ckpt_path=path, weights_only=True)
        assert_same(weights_of(later), theirs)


# -- copies ----------------------------------------------------------------------------------------------------------------


class Copying(Net):
    """Copies what refers to it, in a run."""

    def __init__(self, act: Callable[[L.Trainer], object]) -> None:
        super().__init__()
        self.act = [act]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "act": []}  # which pickle cannot take

    def on_train_batch_end(self, *args: Any) -> None:
        self.act[0](self.trainer)


COPIES: dict[str, Callable[[L.Trainer], object]] = {
    "trainer saved": lambda trainer: torch.save(trainer, io.BytesIO()),
    "trainer copied": copy.deepcopy,
    "callbacks copied": lambda trainer: copy.deepcopy(trainer.callbacks),  # type: ignore[attr-defined]
    "strategy pickled": lambda trainer: pickle.dumps(trainer.strategy),
    "module copied": lambda trainer: copy.deepcopy(trainer.lightning_module),
    "part pickled": lambda trainer: pickle.dumps(trainer.lightning_module.blocks[1]),  # type: ignore[union-attr]
}


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_copies_in_a_run_change_nothing(strategy_at: Any, tier: str, recompute: str, tmp_path: Path) -> None:
    tried: list[str] = []

    def act(trainer: L.Trainer) -> None:
        for name, made in COPIES.items():
            made(trainer)
            tried.append(name)

    saving = ModelCheckpoint(tmp_path)
    module = Copying(act)
    strategy = strategy_at(tier, recompute=recompute)
    trainer_with(strategy, callbacks=[saving], enable_checkpointing=True).fit(module, batches())
    assert len(tried) == 3 * len(COPIES)
    assert_same(weights_of(module), weights_of(fitted(Net, "auto")))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_copy_in_a_run_is_of_that_moment_and_on_its_own(strategy_at: Any, tier: str, recompute: str) -> None:
    def trained(strategy: Any, copied: bool) -> tuple[Net, dict[str, Tensor]]:
        found: dict[str, Tensor] = {}

        def act(trainer: L.Trainer) -> None:
            twin = copy.deepcopy(trainer) if copied else trainer
            module = twin.lightning_module
            at = f"step {trainer.global_step}: "
            found.update({at + name: value.clone() for name, value in module.state_dict().items()})
            batch = next(iter(batches()))[0]
            loss = module(batch).sum()  # type: ignore[operator]
            found[at + "loss"] = loss.detach()
            if copied:
                loss.backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.zero_()  # nobody else's

        module = Copying(act)
        trainer_with(strategy).fit(module, batches())
        return module, found

    module, found = trained(strategy_at(tier, recompute=recompute), copied=True)
    theirs, expected = trained("auto", copied=False)
    assert_same(weights_of(module), weights_of(theirs))
    assert_same(found, expected)


def test_a_copied_trainer_does_not_train_on_without_what_its_optimizer_has_learnt(strategy_at: Any) -> None:
    twins: list[L.Trainer] = []
    trainer_with(strategy_at("ram")).fit(Copying(lambda trainer: twins.append(copy.deepcopy(trainer))), batches())
    twin = twins[-1]
    module, optimizer = Net(), twin.optimizers[0]
    optimizer.param_groups[0]["params"] = list(module.parameters())
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    twin.fit_loop.max_epochs = 5
    with pytest.raises(UsageError, match="were lost at the end of an earlier run"):
        twin.fit(module, batches())


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_copies_of_a_trainer_after_a_run(strategy_at: Any, tier: str) -> None:
    trainer = trainer_with(strategy_at(tier))
    trainer.fit(Net(), batches())
    buffer = io.BytesIO()
    torch.save(trainer, buffer)
    buffer.seek(0)
    for again in (torch.load(buffer, weights_only=False), copy.deepcopy(trainer)):
        assert_same(weights_of(again.lightning_module), weights_of(trainer.lightning_module))  # type: ignore[arg-type]
    assert_same(weights_of(copy.deepcopy(trainer.lightning_module)), weights_of(fitted(Net, "auto")))  # type: ignore[arg-type]


# -- behind a run, and before the next one's pages --------------------------------------------------------------------------


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
@pytest.mark.parametrize("room", [True, False])
def test_a_loop_of_the_user_does_not_begin_anew_in_silence(
    strategy_at: Any, tier: str, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop by hand after the run uses the optimizer's moments if they still exist, as with one device, and raises
    otherwise."""

    def fit_then_backward(strategy: Any) -> tuple[Net, torch.optim.Optimizer]:
        trainer, module = trainer_with(strategy), Net()
        trainer.fit(module, batches())
        (optimizer,) = trainer.optimizers
        optimizer.zero_grad()
        module.training_step(next(iter(batches())), 0).backward()
        return module, optimizer

    if not room:
        little_ram(monkeypatch, Net())
    ours, optimizer = fit_then_backward(strategy_at(tier))
    assert optimizer.state or not room
    if optimizer.state:
        optimizer.step()
        theirs, their_optimizer = fit_then_backward("auto")
        their_optimizer.step()
        assert_same(weights_of(ours), weights_of(theirs))
        return
    before = weights_of(ours)
    for act in (optimizer.step, optimizer.state_dict):
        with pytest.raises(UsageError, match="states of this AdamW were lost at the end of an earlier run"):
            act()
    for copied in (copy.deepcopy, copy.copy, lambda each: copy.deepcopy(pickle.loads(pickle.dumps(each)))):
        with pytest.raises(UsageError, match="states of this AdamW were lost at the end of an earlier run"):
            copied(optimizer).step()
    assert_same(weights_of(ours), before)
    optimizer.register_load_state_dict_post_hook(lambda _: None)  # a user's own, behind ours
    theirs, their_optimizer = fit_then_backward("auto")
    optimizer.load_state_dict(copy.deepcopy(their_optimizer.state_dict()))
    for each in (optimizer, their_optimizer):
        each.step()
    assert_same(weights_of(ours), weights_of(theirs))


class LooksAtWeights(Net):
    """Module whose optimizer skips values close to zero; it counts loads of the optimizer's state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: State = {}
        self.loads = 0
        self.register_load_state_dict_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.loads += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.seen = weights_of(self)
        return super().configure_optimizers()


@pytest.mark.slow_unless("all_on_disk-full", "lock_free_three_tiers-sharded")
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_configure_optimizers_sees_the_weights_of_the_checkpoint(
    strategy_at: Any, tier: str, kind: str, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(tmp_path, filename="first", save_last=False)
    module = LooksAtWeights()
    trainer_with(
        strategy_at(tier, checkpoints={"state_dict_type": kind}), enable_checkpointing=True, callbacks=[saves]
    ).fit(module, batches())
    again = LooksAtWeights()
    trainer_with(strategy_at(tier, checkpoints={"state_dict_type": kind}), max_epochs=2).fit(
        again, batches(), ckpt_path=tmp_path / "first.ckpt"
    )
    assert_same(again.seen, weights_of(module))
    assert again.loads == 1


# -- the disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["ram", "all_on_disk"])
def test_a_disk_path_is_made(strategy_at: Any, home: str, tmp_path: Path) -> None:
    """Nobody else may look into it: the bytes of the model are there."""
    folder = tmp_path / "yet"
    fitted(Net, strategy_at(home, disk_path=folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    fitted(Net, strategy_at(home, disk_path=folder))
    assert folder.stat().st_mode & 0o777 == 0o750, "a folder that is there stays as it is"
