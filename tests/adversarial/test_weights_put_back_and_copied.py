"""Operations of libraries on a module during a run: they load other weights, copy it, pickle it, give parameters other
data."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import WIDTH, Twin, assert_alike, quietly, trained, trainer, vectors
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_ptm.errors import CapacityError, UsageError

PLACES = ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "tight"]


def least(make: MakeStrategy, build: Callable[[], Twin], **options: Any) -> Any:
    """A strategy with everything on disk and the least device memory that the plan of one step takes."""
    for kib in range(192, 2048, 64):
        strategy = make("all_on_disk", device_memory=f"{kib}KiB")
        try:
            trained(build, strategy, max_steps=1, **options)
        except CapacityError:
            continue
        return make("all_on_disk", device_memory=f"{kib}KiB")
    raise AssertionError("no device memory is enough")


def same(make: MakeStrategy, place: str, build: Callable[[], Twin], **options: Any) -> Twin:
    if place == "tight":
        strategy = least(make, build, **options)
    else:
        strategy = make(place)
    ours = trained(build, strategy, **options)
    assert_alike(ours, trained(build, None, **options))
    return ours  # type: ignore[no-any-return]


# -- other weights are loaded -----------------------------------------------------------------------------------------


class PutsBack(Twin):
    """Keeps the weights of the first step and loads them when `when` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.best: dict[str, Tensor] = {}

    def part(self) -> nn.Module:
        return self

    def keep(self) -> None:
        self.best = {name: value.clone() for name, value in self.part().state_dict().items()}

    def put_back(self) -> None:
        self.part().load_state_dict(self.best)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 1:
            self.keep()


class AtTheEnd(PutsBack):
    def on_train_end(self) -> None:
        self.put_back()


class OfBlocks(PutsBack):
    def part(self) -> nn.Module:
        return self.blocks

    def on_train_batch_start(self, *args: Any) -> None:
        if self.trainer.global_step == 2:
            self.put_back()


class OfOneLayer(OfBlocks):
    def part(self) -> nn.Module:
        return self.blocks[1]


class InTheStep(OfBlocks):
    on_train_batch_start = Twin.on_train_batch_start

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.trainer.global_step == 2:
            self.put_back()
        return super().training_step(batch, index)


class InTheEvaluation(PutsBack):
    def on_validation_start(self) -> None:
        if self.best:
            self.put_back()

    def val_dataloader(self) -> Any:
        return vectors()


class WithoutSome(PutsBack):
    """Loads a checkpoint that lacks a weight, and has one too many."""

    def on_train_end(self) -> None:
        del self.best["stem.bias"]
        self.best["other"] = torch.ones(1)
        found = self.load_state_dict(self.best, strict=False)
        assert found.missing_keys == ["stem.bias"] and found.unexpected_keys == ["other"]


class WithBuffers(PutsBack):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        self.put_back()


class Hooked(PutsBack):
    """Module whose checkpoints use other names, like those of an older version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._renamed)

    @staticmethod
    def _renamed(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state if name.startswith("old_")]:
            state[name.removeprefix("old_")] = state.pop(name)

    def on_train_end(self) -> None:
        self.best = {f"old_{name}": value for name, value in self.best.items()}
        self.put_back()


class ByGathered(PutsBack):
    """The program of who knows us."""

    def on_train_end(self) -> None:
        gathered = getattr(self.trainer.strategy, "gathered", None)
        if gathered is None:
            self.put_back()
            return
        with gathered(self):
            self.put_back()


class FromACallback(PutsBack):
    def configure_callbacks(self) -> Any:
        class Restores(Callback):
            def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
                module.put_back()

        return [Restores()]


class HalfOfTheEpoch(PutsBack):
    """Goes on to train from what was loaded, with the moments that there are."""

    def on_train_epoch_end(self) -> None:
        self.put_back()


LOADS = [AtTheEnd, OfBlocks, OfOneLayer, InTheStep, InTheEvaluation, WithoutSome, WithBuffers, Hooked, ByGathered]
LOADS += [FromACallback, HalfOfTheEpoch]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("build", LOADS, ids=lambda each: each.__name__)
def test_weights_are_loaded_during_a_run(strategy_at: MakeStrategy, place: str, build: Callable[[], Twin]) -> None:
    same(strategy_at, place, build, max_epochs=2)


@pytest.mark.parametrize("place", ["masters_on_disk", "all_on_disk", "lock_free"])
def test_what_cannot_be_loaded_is_torch_s_error(strategy_at: MakeStrategy, place: str) -> None:
    class Mistaken(PutsBack):
        def on_train_end(self) -> None:
            with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"stem.bias\""):
                self.load_state_dict({name: value for name, value in self.best.items() if name != "stem.bias"})
            with pytest.raises(RuntimeError, match=r"size mismatch for head.bias") as caught:
                self.load_state_dict({**self.best, "head.bias": torch.ones(7)})
            assert "exception occurred" not in str(caught.value)
            if type(self.trainer.strategy).__name__ == "AngelPTMStrategy":
                with pytest.raises(UsageError, match=r"assign=True.*replace the parameters of the Mistaken"):
                    self.load_state_dict(self.best, assign=True)

    same(strategy_at, place, Mistaken)


@pytest.mark.parametrize("place", ["masters_on_disk", "all_on_disk"])
def test_loaded_weights_are_precise_under_mixed_precision(strategy_at: MakeStrategy, place: str) -> None:
    class Third(PutsBack):
        def on_train_end(self) -> None:
            self.load_state_dict({name: torch.full_like(value, 1 / 3) for name, value in self.best.items()})

    module = trained(Third, strategy_at(place), precision="bf16-mixed")
    assert all(torch.equal(each, torch.full_like(each, 1 / 3)) for each in module.parameters())


# -- the module is copied ---------------------------------------------------------------------------------------------


def saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


def copied_list(module: nn.Module) -> nn.Module:
    return copy.deepcopy([1, {"it": module}])[1]["it"]  # type: ignore[index, no-any-return]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "inside of others": copied_list,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "a copy of a copy": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(module)))),
}


class Copied(Twin):
    """Notes a copy's weights and outputs in the middle of a step, behind it, and at the end."""

    way: Callable[[nn.Module], nn.Module]

    def look(self) -> None:
        for part, of in ((self.stem, 6), (self.blocks[1], WIDTH)):
            twin = type(self).way(part)
            assert twin is not part and not any(a is b for a in twin.parameters() for b in self.parameters())
            self.losses += [each.detach().clone() for each in twin.state_dict().values()]
            self.losses.append(twin(torch.ones(2, of)).detach())
            assert [each.requires_grad for each in twin.parameters()] == [True, True]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.look()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.look()

    def on_train_end(self) -> None:
        self.look()


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_parts_are_copied_during_a_run(strategy_at: MakeStrategy, place: str, recompute: str, way: str) -> None:
    build = type("Copied", (Copied,), {"way": staticmethod(WAYS[way])})

    def make(tier: str, **options: Any) -> Any:
        return strategy_at(tier, recompute=recompute, **options)

    same(make, place, build)


class Looks(Twin):
    """Copies what refers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.twins: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "twins": []}

    def on_fit_start(self) -> None:
        copy.deepcopy(self.trainer.callbacks)  # type: ignore[attr-defined]

    def on_train_batch_end(self, *args: Any) -> None:
        twin = copy.deepcopy(self.trainer)
        strategy = pickle.loads(pickle.dumps(self.trainer.strategy))
        for each in (twin.lightning_module, strategy.lightning_module):
            self.losses += [value.detach().clone() for value in each.parameters()]

    def on_train_end(self) -> None:
        self.twins = [copy.deepcopy(self.trainer)]


@pytest.mark.parametrize("place", PLACES[:-1])
def test_what_refers_to_the_module_is_copied(strategy_at: MakeStrategy, place: str) -> None:
    ours = same(strategy_at, place, Looks)
    with quietly():
        (twin,) = ours.twins
        module = twin.lightning_module
        twin.fit_loop.max_epochs = 2
        twin.fit(module, vectors())
        assert twin.global_step == 6


# -- strategies are copied before a run -------------------------------------------------------------------------------

STRATEGY_WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda strategy: pickle.loads(pickle.dumps(strategy)),
    "deepcopy, twice": lambda strategy: copy.deepcopy(copy.deepcopy(strategy)),
    "copy, twice": lambda strategy: copy.copy(copy.copy(strategy)),
    "pickle of a copy": lambda strategy: pickle.loads(pickle.dumps(copy.deepcopy(strategy))),
    "copy of a pickle": lambda strategy: copy.copy(pickle.loads(pickle.dumps(strategy))),
    "arguments of a Trainer": lambda strategy: copy.deepcopy({"strategy": copy.deepcopy({"s": strategy})})["strategy"][
        "s"
    ],
    "torch.save, twice": lambda strategy: saved(saved(strategy)),
}


@pytest.mark.parametrize("way", STRATEGY_WAYS)
def test_a_copy_of_a_strategy_trains(strategy_at: MakeStrategy, way: str) -> None:
    assert_alike(trained(Twin, STRATEGY_WAYS[way](strategy_at("all_on_disk"))), trained(Twin))


class CopiesStrategy(Twin):
    """In each batch."""

    way: str

    def on_train_batch_end(self, *args: Any) -> None:
        STRATEGY_WAYS[self.way](self.trainer.strategy)


@pytest.mark.parametrize("way", STRATEGY_WAYS)
@pytest.mark.parametrize("place", ["ram", "all_on_disk"])
def test_a_strategy_that_is_copied_in_its_run_goes_on(
    strategy_at: MakeStrategy, place: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopiesStrategy, "way", way, raising=False)
    same(strategy_at, place, CopiesStrategy)


# -- parameters get other data in the middle of a step ----------------------------------------------------------------


class Adversarial(Twin):
    """FGM: the gradient at perturbed weights is added, and the weights are put back by their data."""

    perturbed = ("stem.weight",)
    keeps_backup = False

    def __init__(self) -> None:
        super().__init__()
        self.batch: Any = None
        self.backup: dict[str, Tensor] = {}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.batch = batch
        return super().training_step(batch, index)

    def attack(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self.perturbed and parameter.grad is not None:
                self.backup[name] = parameter.data.clone()
                parameter.data.add_(0.1 * parameter.grad / parameter.grad.norm())

    def restore(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self.backup:
                parameter.data = self.backup[name]
        if not self.keeps_backup:
            self.backup = {}

    def once_more(self) -> None:
        loss = self(self.batch[0]).square().mean()
        loss.backward()
        self.losses.append(loss.detach().clone())

    def on_after_backward(self) -> None:
        self.attack()
        self.once_more()
        self.restore()


class Several(Adversarial):
    """PGD: three steps away, and back."""

    perturbed = ("stem.weight", "blocks.1.weight", "head.bias")

    def on_after_backward(self) -> None:
        for _ in range(3):
            kept = dict(self.backup)
            self.attack()
            self.backup |= kept
            self.once_more()
        self.restore()


class KeepsBackup(Adversarial):
    keeps_backup = True

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses += [value.clone() for value in self.backup.values()]  # which the step has changed


class BeforeTheStep(Adversarial):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_after_backward()

    def on_after_backward(self) -> None:
        pass


class Clipped(Adversarial):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class InManual(Adversarial):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()  # type: ignore[union-attr]
            loss = super().training_step(batch, index)
            self.manual_backward(loss)  # calls on_after_backward
            optimizer.step()  # type: ignore[union-attr]


class OfHalf(Adversarial):
    """Half of the parameters, with a group of its own and another optimizer's rule."""

    def configure_optimizers(self) -> Any:
        rest = [each for name, each in self.named_parameters() if name not in self.perturbed]
        return torch.optim.SGD(
            [{"params": [self.stem.weight], "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.9, fused=True
        )


class Noise(Twin):
    """No gradient is asked for: data is replaced before the step alone."""

    def on_after_backward(self) -> None:
        self.head.weight.data = self.head.weight.data + 0.01


class OnlyOnce(Adversarial):
    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            super().on_after_backward()


class Accumulated(Adversarial):
    """Every micro-batch."""


class SecondOptimizer(InManual):
    def configure_optimizers(self) -> Any:
        parts = [*self.stem.parameters()], [*self.blocks.parameters(), *self.head.parameters()]
        return [torch.optim.AdamW(part, lr=0.01, fused=True) for part in parts]

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        first, second = self.optimizers()
        self.batch = batch
        for each in (first, second):
            each.zero_grad()
        self.manual_backward(self(batch[0]).square().mean())
        first.step()
        second.step()


REPLACING: dict[Any, dict[str, Any]] = {
    Adversarial: {},
    Several: {},
    KeepsBackup: {},
    BeforeTheStep: {},
    Clipped: {},
    InManual: {},
    OfHalf: {},
    Noise: {},
    OnlyOnce: {},
    Accumulated: {"accumulate_grad_batches": 2},
    SecondOptimizer: {},
}


@pytest.mark.parametrize("build", REPLACING, ids=lambda each: each.__name__)
def test_parameters_get_other_data_in_mid_step(strategy_at: MakeStrategy, build: Any) -> None:
    same(strategy_at, "ram", build, max_epochs=2, **REPLACING[build])


def test_parameters_exchange_their_data_in_mid_step(strategy_at: MakeStrategy) -> None:
    class Exchanges(Twin):
        def on_after_backward(self) -> None:
            first, second = self.blocks[0].weight, self.blocks[1].weight
            first.data, second.data = second.data, first.data

    same(strategy_at, "ram", Exchanges, max_epochs=2)


def test_two_parameters_that_get_the_same_data_are_refused(strategy_at: MakeStrategy) -> None:
    class Tied(Twin):
        def on_after_backward(self) -> None:
            self.blocks[1].weight.data = self.blocks[0].weight.data

    with pytest.raises(UsageError, match=r"blocks.0.weight and blocks.1.weight were given the same data in mid-step"):
        trained(Tied, strategy_at("ram"))


# -- no_sync ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES[:-1])
@pytest.mark.parametrize("name", ["strategy", "strategy.model", "model"])
def test_no_sync_is_where_ddp_has_it(strategy_at: MakeStrategy, place: str, name: str) -> None:
    class Sums(Twin):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], index: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            owner: Any = self.trainer
            for each in name.split("."):
                owner = getattr(owner, each)
            if hasattr(owner, "no_sync"):
                with owner.no_sync():
                    self.manual_backward(self(batch[0]).square().mean())
            else:
                assert type(self.trainer.strategy).__name__ == "SingleDeviceStrategy"
                self.manual_backward(self(batch[0]).square().mean())
            self.manual_backward(self(batch[0]).sum())
            optimizer.step()

    ours = same(strategy_at, place, Sums)
    assert not hasattr(ours, "no_sync") and "__getstate__" not in vars(ours)


# -- unfreezing beside stochastic averaging ---------------------------------------------------------------------------


class Thaws(Twin):
    """Trains its stem from an epoch on."""

    since = 1

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.since:
            self.stem.requires_grad_(True)


class ThawsWhenAveraged(Thaws):
    since = 2


class ThawsBehind(Thaws):
    since = 3


class ThawsInTheMiddle(Thaws):
    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, *args: Any) -> None:
        if self.trainer.global_step == 4:
            self.stem.requires_grad_(True)


class ThawsTwice(Thaws):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 2:
            self.blocks[0].requires_grad_(True)


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES[:-1])
@pytest.mark.parametrize("build", [Thaws, ThawsWhenAveraged, ThawsBehind, ThawsInTheMiddle, ThawsTwice])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}], ids=str)
def test_unfreezing_beside_stochastic_averaging(
    strategy_at: MakeStrategy, place: str, build: Any, options: dict[str, Any]
) -> None:
    def with_averaging(strategy: Any) -> Twin:
        with quietly():
            torch.manual_seed(0)
            module = build()
            averaging = L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)
            trainer(strategy, max_epochs=5, callbacks=[averaging], **options).fit(module, vectors())
        return module  # type: ignore[no-any-return]

    assert_alike(with_averaging(strategy_at(place)), with_averaging(None))


class Delegates(nn.Module):
    """Asks the module inside for what it lacks, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class CopiesDelegating(Twin):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Delegates(Delegates(each)) for each in self.blocks)

    def on_train_batch_end(self, *args: Any) -> None:
        block, x = self.blocks[1], torch.ones(1, self.blocks[1].in_features)
        copies = [copy.deepcopy(block), copy.deepcopy(self.blocks)[1], pickle.loads(pickle.dumps(block))]
        self.losses += [each(x).detach() for each in copies]
        assert {type(each) for each in (*copies, copy.copy(block))} == {Delegates}


@pytest.mark.parametrize("place", ["ram", "masters_on_disk", "all_on_disk"])
def test_a_module_that_asks_another_for_what_it_lacks_is_copied_itself(strategy_at: MakeStrategy, place: str) -> None:
    assert_alike(trained(CopiesDelegating, strategy_at(place)), trained(CopiesDelegating))
