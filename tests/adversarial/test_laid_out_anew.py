"""Parameters are unfrozen, or get into other groups, between two batches: a run in pages goes on as a plain Trainer does."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit.judged import WIDTH, ByHand, Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.checkpoints.carried_states import CarriedStates, StatesInFiles
from lightning_ptm.errors import CapacityError, PageIOError, UsageError
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.sharded import ShardedCheckpointIO
from lightning_ptm.trainer import relayout
from lightning_ptm.trainer.run import Run

PAGED = ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free"]
ON_DISK = ["masters_on_disk", "all_on_disk"]


class Unfreezing(Judged):
    """Trains its last block from the second epoch on, which its optimizer has had all the time, or gets then."""

    added = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def chosen(self) -> list[nn.Parameter]:
        return [each for each in self.parameters() if each.requires_grad or not self.added]

    def configure_optimizers(self) -> Any:
        made = torch.optim.AdamW(self.chosen(), lr=1e-2, fused=True)
        return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)}

    def unfreeze(self) -> None:
        self.blocks[1].requires_grad_(True)
        if self.added:
            self.optimizers().add_param_group({"params": list(self.blocks[1].parameters()), "lr": 1e-3})

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.unfreeze()


class Adding(Unfreezing):
    added = True


class Loading(Adding):
    """Loads what its optimizer has, in a hook, when the run was laid out anew."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.current_epoch == 2:
            optimizer = self.optimizers().optimizer
            optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("home", ["ram", "masters_on_disk"])
def test_what_an_optimizer_loads_afterwards_is_followed(strategy_at: MakeStrategy, home: str) -> None:
    judge(Loading, strategy_at(home), max_epochs=4)


@pytest.mark.diagonal
@pytest.mark.parametrize("build", [Unfreezing, Adding])
@pytest.mark.parametrize("home", PAGED)
def test_parameters_that_are_unfrozen_train_from_then_on(
    strategy_at: MakeStrategy, build: type[Judged], home: str, disk: Path
) -> None:
    judge(build, strategy_at(home), max_epochs=3)
    assert not [*disk.iterdir()]


@pytest.mark.diagonal
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"precision": "64-true"}]
)
@pytest.mark.parametrize("home", ON_DISK)
def test_with_what_a_trainer_can_be_given(strategy_at: MakeStrategy, home: str, options: dict[str, Any]) -> None:
    judge(Adding, strategy_at(home), max_epochs=3, **options)


class Momentum(Adding):
    """A state without scalars, and a group that is taken away."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.first.parameters()}, {"params": self.head.parameters(), "lr": 3e-3}]
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True)

    def unfreeze(self) -> None:
        super().unfreeze()
        del self.optimizers().param_groups[1]


class Factored(Adding):
    """States that have shapes of their own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.chosen(), lr=1e-2)


class Two(Adding, ByHand):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.first.parameters(), lr=1e-2, fused=True),
            torch.optim.SGD(self.head.parameters(), lr=1e-2, momentum=0.9, fused=True),
        ]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def unfreeze(self) -> None:
        self.blocks[1].requires_grad_(True)
        self.optimizers()[1].add_param_group({"params": list(self.blocks[1].parameters()), "lr": 1e-3})


class ForgottenByTheModule(Two):
    """Gradients of what no step has used are in pages, too, when the module forgets them."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.zero_grad()


class Running(Adding):
    """Statistics that a run goes on with, and weights in an order of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.image = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.norm(batch[0])
        return super().loss([x]) + self.image(x.view(-1, 2, 2, 2)).square().mean()


class Refreezing(Adding):
    """Freezes and unfreezes by turns."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.unfreeze()
        if self.current_epoch == 2:
            self.blocks[1].requires_grad_(False)
        if self.current_epoch == 3:
            self.blocks.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks[0].parameters())})


class ByTurns(Judged):
    """One block trains while the other one rests, whose moments it goes on with; what is saved meanwhile has these, too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def on_train_epoch_start(self) -> None:
        for at, block in enumerate(self.blocks):
            block.requires_grad_(at == self.current_epoch % 2)
        self.more = nn.Parameter(torch.ones(WIDTH))  # also where nothing was unfrozen, all is laid out anew

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.more.square().mean()

    def on_train_epoch_end(self) -> None:
        saved: Any = self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for place, state in sorted(saved["optimizer_states"][0]["state"].items()):
            for name, value in sorted(state.items()):
                self.note((place, name))
                self.note(value)


class RestingWhole(ByTurns):
    """States that have shapes of their own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


class Untrained(Unfreezing):
    """A parameter that is unfrozen gets gradients, and has no optimizer."""

    def chosen(self) -> list[nn.Parameter]:
        return [*self.first.parameters(), *self.head.parameters()]


class AfterValidation(Adding):
    def val_dataloader(self) -> Any:
        return batches(2)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch)

    def on_train_epoch_start(self) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.unfreeze()


class Edited(Adding):
    """Weights are edited by hand just before."""

    def on_train_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        paged = isinstance(strategy, AngelPTMStrategy)
        with strategy.gathered(self) if paged else nullcontext(), torch.no_grad():
            for each in self.parameters():
                each.mul_(0.9)


class Toggled(Two):
    """Optimizers by turns, as a GAN's, one of which gets what is unfrozen."""

    def training_step(self, batch: list[Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class StepByStep(Adding):
    """One block more in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend([*Judged().blocks, *Judged().blocks])
        self.blocks.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        frozen = [block for block in self.blocks if not block.scale.requires_grad]
        if frozen:
            frozen[-1].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(frozen[-1].parameters())})


BUILDS = [
    Momentum,
    Factored,
    Two,
    Toggled,
    ForgottenByTheModule,
    Running,
    Refreezing,
    ByTurns,
    RestingWhole,
    Untrained,
    AfterValidation,
    Edited,
    StepByStep,
]


@pytest.mark.slow_unless(
    "masters_on_disk-ForgottenByTheModule",
    "masters_on_disk-Refreezing",
    "masters_on_disk-AfterValidation",
    "masters_on_disk-Edited",
    "all_on_disk-Two",
    "all_on_disk-Toggled",
    "all_on_disk-ByTurns",
)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("home", ON_DISK)
def test_whatever_is_kept_of_parameters_goes_with_them(
    strategy_at: MakeStrategy, build: type[Judged], home: str
) -> None:
    judge(build, strategy_at(home), max_epochs=4)


class UnfrozenAgain(Unfreezing):
    """Module whose last block is frozen again in a run that resumes from a later epoch, until that epoch begins."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.unfreeze()


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("home", ON_DISK)
def test_states_that_a_checkpoint_has_of_what_is_frozen_are_there_when_it_trains(
    strategy_at: MakeStrategy, home: str, kind: str, tmp_path: Path
) -> None:
    def went_on(strategy: Callable[[], AngelPTMStrategy | None], name: str) -> Judged:
        saving = ModelCheckpoint(tmp_path, filename=name)
        run(UnfrozenAgain, strategy(), max_epochs=2, callbacks=[saving], enable_checkpointing=True)
        module = UnfrozenAgain()
        trainer(strategy(), max_epochs=3).fit(module, batches(), ckpt_path=saving.best_model_path)
        return module

    assert_alike(
        went_on(lambda: strategy_at(home, checkpoints={"state_dict_type": kind}), "ours"),
        went_on(lambda: None, "plain"),
    )


class OneElement(Adding):
    """A bias of one element, in a unit that has been let go of when the run is laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)


def test_a_parameter_of_one_element_is_no_strided_one(strategy_at: MakeStrategy) -> None:
    strategy = strategy_at("all_on_disk", checkpoints={"state_dict_type": "sharded"}, units=["Linear"])
    assert_alike(run(OneElement, strategy, max_epochs=2), run(OneElement, None, max_epochs=2))


def test_what_callbacks_keep_of_weights_goes_on(strategy_at: MakeStrategy) -> None:
    ours = run(Adding, strategy_at("masters_on_disk"), max_epochs=3, callbacks=[EMAWeightAveraging()])
    assert_alike(ours, run(Adding, None, max_epochs=3, callbacks=[EMAWeightAveraging()]))


def test_who_listens_goes_on_hearing(strategy_at: MakeStrategy) -> None:
    heard: list[int] = []

    class Heard(Adding):
        def on_train_start(self) -> None:
            self.listening = ExitStack()
            told = lambda _: heard.append(self.current_epoch)  # noqa: E731
            self.listening.enter_context(self.trainer.strategy.trace_events(told))  # type: ignore[attr-defined]

        def on_train_end(self) -> None:
            self.listening.close()

    run(Heard, strategy_at("masters_on_disk"), max_epochs=2)
    assert set(heard) == {0, 1}


@pytest.mark.parametrize("home", ON_DISK)
def test_a_disk_that_fails_when_weights_are_given_back_is_told(strategy_at: MakeStrategy, home: str) -> None:
    """After a run that was laid out anew: parameters of which nobody knows the values any more cannot be read."""

    class Ending(Adding):
        def on_train_end(self) -> None:
            files.anew, files.left = True, 0

    strategy, module = strategy_at(home), Ending()
    files = strategy.file_ops = Failing(0)
    files.numbers = {"preadv": errno.EIO}
    files.duplicate = FileOps.duplicate.__get__(files)  # type: ignore[method-assign]
    with pytest.raises(PageIOError, match="Input/output error"):
        trainer(strategy, max_epochs=2, precision="bf16-mixed").fit(module, batches())
    with pytest.raises(UsageError, match="values ended with its run"):
        module.head.weight.sum()


def test_units_are_recomputed_as_before(strategy_at: MakeStrategy) -> None:
    judge(Adding, strategy_at("all_on_disk", recompute="all"), max_epochs=3)


def test_saves_that_are_under_way_are_of_the_time_before(strategy_at: MakeStrategy, tmp_path: Path) -> None:
    def weights(strategy: AngelPTMStrategy | None, folder: Path) -> list[dict[str, Tensor]]:
        saving = ModelCheckpoint(
            folder, save_top_k=-1, every_n_train_steps=1, filename="{step}", save_weights_only=True
        )
        run(Adding, strategy, max_epochs=3, callbacks=[saving], enable_checkpointing=True)
        read = ShardedCheckpointIO().load_checkpoint
        return [read(folder / f"step={step}.ckpt", weights_only=False)["state_dict"] for step in range(1, 10)]

    ours = weights(
        strategy_at("all_on_disk", checkpoints={"state_dict_type": "sharded", "async_save": True}), tmp_path / "ours"
    )
    for mine, theirs in zip(ours, weights(None, tmp_path / "theirs"), strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@pytest.mark.diagonal
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("home", ["ram", *ON_DISK])
def test_what_was_frozen_begins_with_all_its_bits(strategy_at: MakeStrategy, home: str, precision: str) -> None:
    """Under mixed precision pages of frozen parameters are rounded; what is trained later begins with what it was."""

    class Looking(Adding):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.chosen(), lr=0.0, momentum=0.9, fused=True)

        def unfreeze(self) -> None:
            self.blocks[1].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.blocks[1].parameters()), "lr": 0.0})

        def on_train_epoch_end(self) -> None:
            for name, value in self.trainer.strategy.lightning_module_state_dict().items():
                assert value.dtype is torch.float32 and torch.equal(value, self.began[name]), name

        def on_fit_start(self) -> None:
            self.began = {
                name: value.clone() for name, value in self.trainer.strategy.lightning_module_state_dict().items()
            }

    module = run(Looking, strategy_at(home), max_epochs=3, precision=precision)
    assert all(torch.equal(value, module.began[name]) for name, value in module.state_dict().items())
    torch.manual_seed(0)
    assert all(torch.equal(value, module.began[name]) for name, value in Looking().state_dict().items())


def test_not_while_gradients_wait_in_pages_for_their_step(strategy_at: MakeStrategy) -> None:
    class Early(Adding):
        def on_train_epoch_start(self) -> None:
            pass

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            if index == 1:
                self.unfreeze()

    judge(Early, strategy_at("masters_on_disk"), accumulate_grad_batches=2)  # they are in .grad, and stay there
    with pytest.raises(UsageError, match=r"while gradients are pending .*zero_grad\(\) after the step"):
        run(Early, strategy_at("all_on_disk"), accumulate_grad_batches=2)


def test_whose_states_end_with_a_group_is_told(strategy_at: MakeStrategy) -> None:
    said: list[str] = []

    class Taking(Momentum):
        def on_train_epoch_end(self) -> None:
            warnings.showwarning = lambda message, *_: said.append(str(message))  # type: ignore[assignment]
            warnings.simplefilter("always")

    run(Taking, strategy_at("masters_on_disk"), max_epochs=2)
    (told,) = [each for each in said if "in no group of SGD any more" in each]
    assert told.startswith("head.weight, head.bias are") and "starts without states" in told


class Failing(FileOps):
    """A disk on which something fails once a run is laid out anew.

    Args:
        after: so many calls that work.
    """

    def __init__(self, after: int = 0, **numbers: int) -> None:
        self.numbers = numbers
        self.left = after
        self.anew = False

    def duplicate(self, fd: int) -> int:
        self.anew = True
        return super().duplicate(fd)

    def fail(self, call: str) -> None:
        if not self.anew or call not in self.numbers:
            return
        self.left -= 1
        if self.left == -1:  # once
            raise OSError(self.numbers[call], os.strerror(self.numbers[call]))

    def fallocate(self, *args: Any, **options: Any) -> None:
        self.fail("fallocate")
        super().fallocate(*args, **options)

    def preadv(self, *args: Any) -> int:
        self.fail("preadv")
        return super().preadv(*args)

    def pwritev(self, *args: Any) -> int:
        self.fail("pwritev")
        return super().pwritev(*args)


@pytest.mark.parametrize("home", ON_DISK)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_disk_without_room_is_said_and_the_weights_are_there(
    strategy_at: MakeStrategy, home: str, precision: str
) -> None:
    def of_one_epoch(strategy: AngelPTMStrategy) -> Judged:
        return run(Adding, strategy, max_epochs=1, precision=precision)

    strategy, module = strategy_at(home), Adding()
    strategy.file_ops = Failing(fallocate=errno.ENOSPC)
    torch.manual_seed(0)
    module = Adding()
    with pytest.raises(PageIOError, match="No space left on device"):
        trainer(strategy, max_epochs=2, precision=precision).fit(module, batches())
    expected = of_one_epoch(strategy_at(home)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_meanwhile_ends_the_run(strategy_at: MakeStrategy, call: str) -> None:
    strategy = strategy_at("all_on_disk")
    strategy.file_ops = Failing(**{call: errno.EIO})
    with pytest.raises(PageIOError, match="Input/output error"):
        run(Cut, strategy, max_epochs=2)


@pytest.mark.slow_unless(
    "pwritev-3-bf16-mixed-False",
    "full-pwritev-6-bf16-mixed-True",
    "sharded-fallocate-0-32-true-True",
    "sharded-preadv-6-32-true-True",
)
@pytest.mark.parametrize(
    ("call", "after", "precision", "there"),
    [
        ("fallocate", 0, "32-true", True),
        ("pwritev", 0, "bf16-mixed", True),  # of masters, when pages of other units have theirs already
        ("pwritev", 3, "bf16-mixed", False),  # what was precise in RAM alone was laid, and let go of
        ("preadv", 6, "32-true", True),  # of moments
        ("pwritev", 6, "bf16-mixed", True),
    ],
)
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_that_fails_meanwhile_saves_nothing_and_gives_back_all_bits_or_none(
    strategy_at: MakeStrategy, tmp_path: Path, call: str, after: int, precision: str, there: bool, kind: str
) -> None:
    strategy = strategy_at("all_on_disk", checkpoints={"state_dict_type": kind})
    strategy.file_ops = Failing(after, **{call: errno.EIO})
    torch.manual_seed(0)
    module = Cut()
    saving = OnExceptionCheckpoint(tmp_path / "saved")
    of = trainer(strategy, max_epochs=2, precision=precision, callbacks=[saving], enable_checkpointing=True)
    with (
        pytest.warns(UserWarning, match=r"no checkpoint .* is written: .* laid out again.* earlier checkpoint"),
        pytest.raises(PageIOError, match="Input/output error"),
    ):
        of.fit(module, batches())
    assert not [*tmp_path.glob("saved/*")]
    expected = run(Cut, strategy_at("all_on_disk"), max_epochs=1, precision=precision).state_dict()
    if there:
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    else:
        with pytest.raises(UsageError, match="was read or written"):
            module.head.weight.sum()
    with pytest.raises(UsageError, match="states"):
        of.optimizers[0].step()


class Cut(Adding):
    """A part of a flat is unfrozen, so that what was trained of it lies elsewhere from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.wide = nn.Linear(64, 256)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.wide(self.blocks[0].inner[0].bias.detach()).square().mean()

    def unfreeze(self) -> None:
        for parameter in (self.first.weight, *self.blocks[1].parameters()):
            parameter.requires_grad_(True)
            self.optimizers().add_param_group({"params": [parameter]})


class Counting(FileOps):
    """Counts bytes that are read and written."""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = 0

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        self.read_bytes += sum(map(len, buffers))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self.written_bytes += sum(map(len, buffers))
        return super().pwritev(fd, buffers, offset)


def carried_in_files(run: Run, optimizers: Any) -> CarriedStates:
    """Carries states in files, as on devices, where old pages cannot stay while new ones exist."""
    return StatesInFiles(run.engine, run.module, optimizers, run.room)


def moved(build: type[Judged], strategy: AngelPTMStrategy, **options: Any) -> tuple[int, int, int]:
    """Bytes that are read and written on disk when a run is laid out anew, and those that are read of old pages."""
    files = strategy.file_ops = Counting()
    found: list[int] = []

    carried: list[Any] = []

    def carried_by(run: Run, optimizers: Any) -> CarriedStates:
        carried.append(carry(run, optimizers))  # when all updates have ended
        found.extend((-files.read_bytes, -files.written_bytes))
        return carried[0]  # type: ignore[no-any-return]

    def lay_out_again(run: Run) -> None:
        lay_out(run)
        found[0] += files.read_bytes
        found[1] += files.written_bytes
        found.append(carried[0].handed.resharder.moved_bytes)

    carry, lay_out = relayout.carried_by, relayout.lay_out_again
    with patch.multiple(relayout, carried_by=carried_by, lay_out_again=lay_out_again):
        run(build, strategy, max_epochs=2, **options)
    read, written, of_pages = found
    return read, written, of_pages


def blocks_of(*parameters: Tensor) -> int:
    """Bytes of a flat of these in fp32, in whole disk blocks."""
    return -(-sum(-(-each.numel() // 64) * 64 for each in parameters) * 4 // 4096) * 4096


def test_what_stays_on_disk_is_neither_read_nor_written(strategy_at: MakeStrategy) -> None:
    module = Adding()
    read, written, of_pages = moved(
        Adding, strategy_at("masters_on_disk", debug={"poison": False}), precision="bf16-mixed"
    )
    assert read == 0
    assert written == blocks_of(*module.blocks[1].parameters()), "masters of what is unfrozen"
    assert of_pages == 2 * sum(each.numel() for each in module.parameters()), "compute parameters, from RAM to RAM"


def test_what_lies_elsewhere_is_moved_once(strategy_at: MakeStrategy) -> None:
    module = Cut()
    read, written, of_pages = moved(
        Cut, strategy_at("masters_on_disk", debug={"poison": False}), precision="bf16-mixed"
    )
    was = [module.first.bias, *module.head.parameters(), *module.wide.parameters()]
    assert read == 3 * blocks_of(*was), "masters and two moments"
    root, block = blocks_of(module.first.weight, *was), blocks_of(*module.blocks[1].parameters())
    assert written == 3 * root + block
    in_ram = 2 * sum(each.numel() for each in module.parameters())
    assert of_pages == in_ram + 3 * 4 * sum(each.numel() for each in was)


@pytest.mark.slow_unless("masters_on_disk", "true-three_tiers", "true-lock_free")
@pytest.mark.parametrize("home", PAGED)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=["true", "mixed"])
def test_parts_of_flats_are_unfrozen(strategy_at: MakeStrategy, home: str, options: dict[str, Any]) -> None:
    if options:  # against ours, laid out so from the start: a plain Trainer rounds elsewhere
        assert_alike(
            run(Cut, strategy_at(home), max_epochs=3, **options), run(Cut, strategy_at("ram"), max_epochs=3, **options)
        )
    else:
        judge(Cut, strategy_at(home), max_epochs=3)


@pytest.mark.slow_unless("Adding", "Cut-int8")
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("build", [Adding, Cut, Refreezing])
def test_encoded_states_go_on_as_codes_or_as_what_they_stand_for(
    strategy_at: MakeStrategy, dtype: str, build: type[Judged]
) -> None:
    ours = run(build, strategy_at("masters_on_disk", optimizer_state_dtype=dtype), max_epochs=3)
    assert_alike(ours, run(build, strategy_at("ram", optimizer_state_dtype=dtype), max_epochs=3))


@pytest.mark.parametrize("build", [Momentum, Factored, Two, Running, Refreezing, Cut])
def test_through_files_it_is_the_same(strategy_at: MakeStrategy, build: type[Judged]) -> None:
    with patch.object(relayout, "carried_by", carried_in_files):
        judge(build, strategy_at("masters_on_disk"), max_epochs=4)


def test_what_is_unfrozen_and_has_no_room_is_said(strategy_at: MakeStrategy, disk: Path) -> None:
    run(Adding, strategy_at("masters_on_disk", disk_memory="64KiB"), max_epochs=1)  # there is room before
    with pytest.raises(CapacityError):
        run(Adding, strategy_at("masters_on_disk", disk_memory="64KiB"), max_epochs=2)
    assert not [*disk.iterdir()]


class Large(Unfreezing):
    """In RAM, a quarter of a gigabyte of states."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 4096))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.large(batch[0][:1, :4]).square().mean()


class Peak(threading.Thread):
    """The most memory of this process that is no file's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = self.now()
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            self.most_bytes = max(self.most_bytes, self.now())

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


@pytest.mark.slow
def test_memory_holds_no_state_twice(strategy_at: MakeStrategy) -> None:
    strategy, more_bytes = strategy_at("ram", page_size="1MiB", debug={"poison": False}), []

    def lay_out_again(run: Run) -> None:
        gc.collect()
        began_bytes, peak = Peak.now(), Peak()
        peak.start()
        lay_out(run)
        peak.ends = True
        peak.join()
        more_bytes.append(peak.most_bytes - began_bytes)

    lay_out = relayout.lay_out_again
    with patch.object(relayout, "lay_out_again", lay_out_again):
        module = run(Large, strategy, max_epochs=2, precision="bf16-mixed")
    assert 14 * sum(each.numel() for each in module.large.parameters()) > 200 << 20
    assert max(more_bytes) < 64 << 20


def test_what_a_run_has_moved_is_counted_from_its_beginning(strategy_at: MakeStrategy) -> None:
    seen: list[tuple[int, int, float]] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            now = trainer.strategy.statistics()
            uses = now.uses
            moved = sum(link.bytes for link in now.links.values())
            seen.append((moved, uses.kept + uses.ahead + uses.late, now.update_arithmetic_s))

    run(Unfreezing, strategy_at("masters_on_disk"), max_epochs=3, callbacks=[Looks()])
    assert len(seen) > 6
    assert all(before[1] < after[1] for before, after in pairwise(seen))
    # Of a step's transfers and updates some are counted in the next one.
    assert all(before[0] <= after[0] and before[2] <= after[2] for before, after in pairwise(seen))
    assert seen[0][0] < seen[-1][0] and seen[0][2] < seen[-1][2]
