"""Between two batches a module gets, loses, replaces or resizes parameters: runs in pages go on as with a plain Trainer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import WIDTH, Block, Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.sharded import ShardedCheckpointIO

HOMES = ["ram", "masters_on_disk", "all_on_disk"]
ON_DISK = ["masters_on_disk", "all_on_disk"]


class Changing(Judged):
    """Changes in the second epoch, with its weights whole."""

    def whole(self) -> AbstractContextManager[None]:
        strategy: Any = self.trainer.strategy
        return strategy.gathered(self) if isinstance(strategy, AngelPTMStrategy) else nullcontext()

    def change(self) -> None:
        raise NotImplementedError

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            with self.whole(), torch.no_grad():
                self.change()

    def swap(self, old: Iterable[Tensor], new: Iterable[Tensor]) -> None:
        """In the optimizer's groups."""
        gone = {id(each) for each in old}
        groups = self.optimizers().param_groups
        for group in groups:
            group["params"] = [each for each in group["params"] if id(each) not in gone]
        groups[0]["params"] += list(new)


class Replaced(Changing):
    def change(self) -> None:
        old = self.head.weight
        self.head.weight = nn.Parameter(old.flip(0))
        self.swap([old], [self.head.weight])


class WithAnotherBlock(Changing):
    def change(self) -> None:
        old = self.blocks[1]
        self.blocks[1] = Block().to(self.head.weight.dtype)
        self.swap(old.parameters(), self.blocks[1].parameters())


class OneBlockMore(Changing):
    def change(self) -> None:
        self.blocks.append(Block())
        self.optimizers().add_param_group({"params": list(self.blocks[2].parameters()), "lr": 1e-3})


class OneBlockLess(Changing):
    def change(self) -> None:
        self.swap(self.blocks[0].parameters(), [])
        del self.blocks[0]


class OfWhichNoOptimizerKnows(Changing):
    def change(self) -> None:
        self.head = nn.Linear(WIDTH, 4)


class BesideTheOldOne(Changing):
    """A parameter that is in no module any more stays in its group, where it has no gradient."""

    def change(self) -> None:
        self.head = nn.Linear(WIDTH, 4)
        self.optimizers().add_param_group({"params": list(self.head.parameters()), "lr": 1e-3})

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 2:  # and once more
            self.blocks.append(Block())
            self.optimizers().add_param_group({"params": list(self.blocks[2].parameters()), "lr": 1e-3})


class Tied(Changing):
    """A parameter of one unit becomes one of two."""

    def change(self) -> None:
        old = self.blocks[1].inner[0].weight
        self.blocks[1].inner[0].weight = self.blocks[0].inner[0].weight
        self.swap([old], [])


class Resized(Changing):
    """Gives the same parameters another shape."""

    def change(self) -> None:
        for each in self.head.parameters():
            each.data = torch.cat([each.data, each.data[:2] / 2])
            del self.optimizers().state[each]


class ResizedAndThenForgotten(Resized):
    def change(self) -> None:
        for each in self.head.parameters():
            each.data = torch.cat([each.data, each.data[:2] / 2])

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            for each in self.head.parameters():
                del self.optimizers().state[each]


class Grown(Changing):
    """Gives the same parameters another shape, and moments of that shape."""

    def change(self) -> None:
        optimizer = self.optimizers()
        state = optimizer.state_dict()
        for place, each in enumerate(optimizer.param_groups[0]["params"]):
            if any(each is known for known in self.head.parameters()):
                kept = state["state"][place]
                for name in ("exp_avg", "exp_avg_sq"):
                    kept[name] = torch.cat([kept[name], kept[name][:2]])
                each.data = torch.cat([each.data, each.data[:2] / 2])
        self.state = state

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.optimizers().optimizer.load_state_dict(self.state)


class WeightNorm(Changing):
    """Put on in the second epoch and removed in the third."""

    def change(self) -> None:
        layer = self.blocks[1].inner[0]
        if self.current_epoch == 1:
            old: list[Tensor] = [layer.weight]
            weight_norm(layer)
            now = layer.parametrizations.weight
            self.swap(old, [now.original0, now.original1])
        else:
            old = list(layer.parametrizations.weight.parameters())
            parametrize.remove_parametrizations(layer, "weight")
            self.swap(old, [layer.weight])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch in (1, 2):
            with self.whole(), torch.no_grad():
                self.change()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Parametrized(WeightNorm):
    def change(self) -> None:
        layer = self.blocks[1].inner[0]
        if self.current_epoch == 1:
            parametrize.register_parametrization(layer, "weight", Symmetric())
        else:
            parametrize.remove_parametrizations(layer, "weight")


class PutBack(Changing):
    """A parameter that was removed has its values when it is added again."""

    def change(self) -> None:
        self.kept = [self.blocks[1]]
        self.swap(self.blocks[1].parameters(), [])
        self.blocks[1] = nn.Identity()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 2:
            for each in self.kept[0].parameters():
                self.note(each)
                self.optimizers().state.pop(each, None)  # else a plain Trainer goes on with the old ones
            self.blocks[1] = self.kept.pop()
            self.swap([], self.blocks[1].parameters())


class Copied(Changing):
    """A block is a copy of another one, and of that one there are copies later."""

    def change(self) -> None:
        self.blocks.append(copy.deepcopy(self.blocks[-1]))
        self.optimizers().add_param_group({"params": list(self.blocks[-1].parameters())})

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            with self.whole(), torch.no_grad():
                self.change()


class WithMomentum(OneBlockMore):
    """States without scalars."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9, fused=True)


class Factored(WithAnotherBlock):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


class InTwoOptimizers(WithAnotherBlock):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        head = [*self.head.parameters()]
        return [
            torch.optim.AdamW([*self.first.parameters(), *self.blocks.parameters(), *head], lr=1e-2, fused=True),
            torch.optim.SGD(head, lr=1e-2, momentum=0.9, fused=True),
        ]

    def optimizers(self, *args: Any, **kwargs: Any) -> Any:
        return super().optimizers(*args, **kwargs)[0]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer in super().optimizers():
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.optimizers().zero_grad()


class BeforeValidation(WithAnotherBlock):
    def val_dataloader(self) -> Any:
        return batches(2)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            with self.whole(), torch.no_grad():
                self.change()


class InAnEvaluation(OneBlockMore):
    def val_dataloader(self) -> Any:
        return batches(2)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def on_train_epoch_start(self) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == 1:
            with torch.inference_mode(False), self.whole(), torch.no_grad():
                self.change()


class BeforeEachBatch(Changing):
    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        with self.whole(), torch.no_grad():
            if index % 2:
                self.blocks.append(Block())
                self.optimizers().add_param_group({"params": list(self.blocks[-1].parameters())})
            else:
                Replaced.change(self)  # type: ignore[arg-type]


class InAPart(Changing):
    """The part that is changed alone is whole."""

    def whole(self) -> AbstractContextManager[None]:
        strategy: Any = self.trainer.strategy
        return strategy.gathered(self.head) if isinstance(strategy, AngelPTMStrategy) else nullcontext()

    def change(self) -> None:
        Replaced.change(self)  # type: ignore[arg-type]


class AtTheEnd(WithAnotherBlock):
    """Nothing follows."""

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 2:
            with self.whole(), torch.no_grad():
                self.change()


BUILDS = [
    Replaced,
    WithAnotherBlock,
    OneBlockMore,
    OneBlockLess,
    OfWhichNoOptimizerKnows,
    BesideTheOldOne,
    Tied,
    Resized,
    ResizedAndThenForgotten,
    Grown,
    WeightNorm,
    Parametrized,
    PutBack,
    Copied,
    WithMomentum,
    Factored,
    InTwoOptimizers,
    BeforeValidation,
    InAnEvaluation,
    BeforeEachBatch,
    InAPart,
    AtTheEnd,
]


@pytest.mark.diagonal
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("home", HOMES)
def test_a_run_goes_on_with_the_parameters_that_there_are(
    strategy_at: MakeStrategy, build: type[Judged], home: str, disk: Path
) -> None:
    judge(build, strategy_at(home), max_epochs=3)
    assert not [*disk.iterdir()]


@pytest.mark.diagonal
@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"precision": "64-true"}])
@pytest.mark.parametrize("home", ["three_tiers", "lock_free"])
def test_wherever_states_live(strategy_at: MakeStrategy, home: str, options: dict[str, Any]) -> None:
    judge(WithAnotherBlock, strategy_at(home), max_epochs=3, **options)


def test_units_are_recomputed_as_before(strategy_at: MakeStrategy) -> None:
    judge(WithAnotherBlock, strategy_at("all_on_disk", recompute="all"), max_epochs=3)


@pytest.mark.diagonal
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("home", HOMES)
def test_what_is_new_keeps_all_its_bits(strategy_at: MakeStrategy, home: str, precision: str) -> None:
    class Looking(WithAnotherBlock):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0, fused=True)

        def change(self) -> None:
            super().change()
            self.began = {name: value.clone() for name, value in self.named_parameters()}

    module = run(Looking, strategy_at(home), max_epochs=3, precision=precision)
    assert all(torch.equal(value, module.began[name]) for name, value in module.named_parameters())
    assert all(value.dtype is torch.float32 for value in module.parameters())


class Saved(OneBlockMore):
    """Saves when it has changed, before the next batch, and where it is built anew begins with what it had then."""

    folder: Path
    blocks_built = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block() for _ in range(self.blocks_built - 2))

    def configure_optimizers(self) -> Any:
        made = torch.optim.AdamW([*self.first.parameters(), *self.head.parameters()], lr=1e-2, fused=True)
        made.add_param_group({"params": list(self.blocks[:2].parameters())})
        if self.blocks_built > 2:
            made.add_param_group({"params": list(self.blocks[2].parameters()), "lr": 1e-3})
        return made

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 4 and self.blocks_built == 2:
            with self.whole(), torch.no_grad():
                self.change()
            self.trainer.save_checkpoint(self.folder / "changed.ckpt")


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("home", HOMES)
def test_a_checkpoint_has_the_parameters_of_its_moment(
    strategy_at: MakeStrategy, home: str, kind: str, tmp_path: Path
) -> None:
    def went_on(strategy: Callable[[], AngelPTMStrategy | None], name: str) -> Judged:
        class Here(Saved):
            folder = tmp_path / name

        class Built(Here):
            blocks_built = 3

        run(Here, strategy(), max_epochs=2)
        module = Built()
        trainer(strategy(), max_epochs=3).fit(module, batches(), ckpt_path=Here.folder / "changed.ckpt")
        return module

    assert_alike(
        went_on(lambda: strategy_at(home, checkpoints={"state_dict_type": kind}), "ours"),
        went_on(lambda: None, "plain"),
    )


@pytest.mark.parametrize("home", ON_DISK)
def test_sharded_checkpoints_behind_training_are_of_the_time_before(
    strategy_at: MakeStrategy, home: str, tmp_path: Path
) -> None:
    def weights(strategy: AngelPTMStrategy | None, folder: Path) -> list[dict[str, Tensor]]:
        saving = ModelCheckpoint(
            folder, save_top_k=-1, every_n_train_steps=1, filename="{step}", save_weights_only=True
        )
        run(WithAnotherBlock, strategy, max_epochs=3, callbacks=[saving], enable_checkpointing=True)
        read = ShardedCheckpointIO().load_checkpoint
        return [read(folder / f"step={step}.ckpt", weights_only=False)["state_dict"] for step in range(1, 10)]

    ours = weights(strategy_at(home, checkpoints={"state_dict_type": "sharded", "async_save": True}), tmp_path / "ours")
    for mine, theirs in zip(ours, weights(None, tmp_path / "theirs"), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("home", ON_DISK)
def test_what_pages_cannot_have_is_refused_while_the_weights_are_there(strategy_at: MakeStrategy, home: str) -> None:
    class Complex(Changing):
        def change(self) -> None:
            self.extra = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.optimizers().add_param_group({"params": [self.extra]})

    plain = run(Judged, None, max_epochs=1)
    torch.manual_seed(0)
    module = Complex()
    with pytest.raises(ConfigError, match=r"parameter extra is torch\.complex64; pages hold"):
        trainer(strategy_at(home), max_epochs=2).fit(module, batches())
    for name, value in plain.named_parameters():
        assert torch.equal(module.get_parameter(name), value), name


@pytest.mark.parametrize("home", HOMES)
def test_whose_states_do_not_fit_any_more_is_told(strategy_at: MakeStrategy, home: str) -> None:
    class Silent(Resized):
        def change(self) -> None:
            self.head.weight.data = torch.ones(6, WIDTH)
            self.head.bias.data = torch.ones(6)

        def on_train_epoch_start(self) -> None:
            warnings.showwarning = lambda message, *_: said.append(str(message))  # type: ignore[assignment]
            warnings.simplefilter("always")
            super().on_train_epoch_start()

    said: list[str] = []
    module = run(Silent, strategy_at(home), max_epochs=2)
    (told,) = [each for each in said if "another shape" in each]
    assert told.startswith("head.weight, head.bias have another shape than the states of AdamW")
    assert module.head.weight.shape == (6, WIDTH) and not torch.equal(module.head.weight, torch.ones(6, WIDTH))


@pytest.mark.parametrize("home", HOMES)
def test_what_no_module_has_is_not_left_untrained_in_silence(strategy_at: MakeStrategy, home: str) -> None:
    class OfNobodyFromTheStart(Judged):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [nn.Parameter(torch.ones(8))]

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss([batch[0] * self.kept[0]])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([*self.parameters(), *self.kept], lr=1e-2, fused=True)

    class OfNobody(Changing):
        def change(self) -> None:
            self.kept = [nn.Parameter(torch.ones(4))]
            self.optimizers().add_param_group({"params": self.kept})

        def loss(self, batch: list[Tensor]) -> Tensor:
            return super().loss(batch) + (self.kept[0].sum() if hasattr(self, "kept") else 0.0)

    for build in (OfNobody, OfNobodyFromTheStart):
        if home == "ram":
            judge(build, strategy_at(home), max_epochs=3)
            continue
        with pytest.raises(UsageError, match=r" is in a group of AdamW and has a gradient, and no module has it"):
            run(build, strategy_at(home), max_epochs=3)


@pytest.mark.parametrize("home", ON_DISK)
def test_what_would_lie_in_the_memory_of_another_one_is_refused(strategy_at: MakeStrategy, home: str) -> None:
    class Sharing(Changing):
        def change(self) -> None:
            self.more = nn.Linear(WIDTH, 4)
            self.more.weight = nn.Parameter(self.head.weight.data)

    with pytest.raises(UsageError, match=r"head.weight and more.weight share memory, .*tensor.clone\(\)"):
        run(Sharing, strategy_at(home), max_epochs=3)


def test_a_run_that_is_cut_short_in_a_change_saves_nothing(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    class Failing(WithAnotherBlock):
        def change(self) -> None:
            super().change()
            raise ValueError("on purpose")

    saving = OnExceptionCheckpoint(tmp_path)
    module = Failing()
    of = trainer(strategy_at("masters_on_disk"), max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    with (
        pytest.warns(UserWarning, match=r"no checkpoint .* is written: .*replaced or resized just before"),
        pytest.raises(ValueError, match="on purpose"),
    ):
        of.fit(module, batches())
    assert not [*tmp_path.glob("*.ckpt")]
    assert all(torch.isfinite(each).all() for each in module.parameters())


def test_not_while_gradients_wait_in_pages_for_their_step(strategy_at: MakeStrategy) -> None:
    class Early(WithAnotherBlock):
        def on_train_epoch_start(self) -> None:
            pass

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 1:
                with self.whole(), torch.no_grad():
                    self.change()

    with pytest.raises(UsageError, match=r"were added, replaced, .* while gradients are pending"):
        run(Early, strategy_at("all_on_disk"), accumulate_grad_batches=2)


class Forgetful(Judged):
    """Module whose optimizer drops states, in each of the ways that a dictionary has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        state = self.trainer.optimizers[0].state
        if self.global_step == 2:
            del state[self.head.weight]
            state.pop(self.first.weight)
            state[self.blocks[0].scale] = {}
        if self.global_step == 5:
            state.clear()


@pytest.mark.parametrize("home", [*HOMES, "lock_free"])
def test_states_that_are_taken_away_are_gone(strategy_at: MakeStrategy, home: str) -> None:
    judge(Forgetful, strategy_at(home), max_epochs=3)


def test_of_states_that_were_taken_away_nobody_has_read_what_they_were(strategy_at: MakeStrategy) -> None:
    class Looking(Judged):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 1:
                self.trainer.optimizers[0].state.pop(self.head.weight)["exp_avg"]

    with pytest.raises(
        UsageError, match=r"optimizer.state of AdamW was read during a run, .* call optimizer\.state_dict\(\)"
    ):
        run(Looking, strategy_at("masters_on_disk"))


class Rewritten(OneBlockMore):
    """A parameter gets other memory when the module changes, outside of `gathered`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change()
            self.write()

    def write(self) -> None:
        self.blocks[0].scale.data = torch.full((WIDTH,), 0.5)


class Swapped(Rewritten):
    def write(self) -> None:
        torch.utils.swap_tensors(self.head.bias, nn.Parameter(torch.full((4,), 0.5)))


@pytest.mark.parametrize("home", ["ram", *ON_DISK, "lock_free"])
@pytest.mark.parametrize("build", [Rewritten, Swapped])
def test_values_that_no_pages_know_are_refused_and_not_lost(
    strategy_at: MakeStrategy, home: str, build: type[Judged]
) -> None:
    if home == "ram":
        judge(build, strategy_at(home), max_epochs=3)
        return
    # Or the re-layout itself reads the parameter, whose unit was released.
    lost = r"values would be lost[,;]|was read or written outside of its module's forward,"
    with pytest.raises(UsageError, match=rf"(blocks.0.scale|head.bias) .*({lost}).*gathered\(module\)"):
        run(build, strategy_at(home), max_epochs=3)
