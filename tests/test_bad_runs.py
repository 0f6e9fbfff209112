"""Failures in mid-run end the run with a clear error, lose nothing that was saved and leave nothing behind.

(`nothing_left_behind` and `disk` in conftest.py look for threads, open files and files on the disk after each test.)
"""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Block
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy, PageIOError, UsageError
from lightning_ptm.memory.disk import FileOps

EVERYWHERE = ["ram", "masters_on_disk", "all_on_disk", "three_tiers"]
AWAY = ["all_on_disk", "three_tiers"]
"""Where units are fetched and released."""


class Stack(L.LightningModule):
    """Three blocks; `before` is called with the module and the index of each batch."""

    def __init__(self, before: Callable[[Stack, int], object] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64, 256) for _ in range(3))
        self.before = before
        self.losses: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self(batch).square().mean()
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if self.before is not None:
            self.before(self, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int = 5) -> DataLoader[Any]:
    rows = torch.randn(4 * count, 64, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def trainer_with(strategy: AngelPTMStrategy, precision: str = "bf16-mixed", **options: Any) -> L.Trainer:
    return quiet_trainer(strategy, precision=precision, **{"max_epochs": 1, **options})


def at(step: int, act: Callable[[Stack], object]) -> Callable[[Stack, int], object]:
    """Calls `act` before that step."""
    return lambda module, index: act(module) if index == step else None


def built(before: Callable[[Stack, int], object] | None = None) -> Stack:
    torch.manual_seed(0)
    return Stack(before)


# -- the disk ---------------------------------------------------------------------------------------------------------


class BreakableFiles(FileOps):
    """A disk that works until `fault` is set."""

    def __init__(self) -> None:
        self.fault = ""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fault == "read_error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.fault == "short_read":
            return super().preadv(fd, [buffers[0][:1024]], offset)
        if self.fault == "end_of_file":
            return 0
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fault == "write_error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault == "short_write":
            return super().pwritev(fd, [buffers[0][:512]], offset)
        return super().pwritev(fd, buffers, offset)


@pytest.mark.slow_unless(
    "masters_on_disk-read_error-5-reading page (\\\\d+) in {path} failed: Input/output error \\\\(errno 5\\\\)",
    "all_on_disk-write_error-28-writing page (\\\\d+) in {path} failed: No space left on device \\\\(errno 28\\\\)",
    "three_tiers-short_write-None-writing page (\\\\d+) in {path} ended after 512 of \\\\d+ bytes \\\\(errno None\\\\)",
)
@pytest.mark.parametrize(
    ("fault", "number", "what"),
    [
        ("read_error", errno.EIO, r"reading page (\d+) in {path} failed: Input/output error \(errno 5\)"),
        ("short_read", None, r"reading page (\d+) in {path} ended after 1024 of \d+ bytes \(errno None\)"),
        ("end_of_file", None, r"reading page (\d+) in {path} ended after 0 of \d+ bytes \(errno None\)"),
        ("write_error", errno.ENOSPC, r"writing page (\d+) in {path} failed: No space left on device \(errno 28\)"),
        ("short_write", None, r"writing page (\d+) in {path} ended after 512 of \d+ bytes \(errno None\)"),
    ],
)
@pytest.mark.parametrize("tier", ["masters_on_disk", "all_on_disk", "three_tiers"])
def test_a_disk_that_fails_in_mid_run(
    strategy_at: Any, tier: str, fault: str, number: int | None, what: str, disk: Path
) -> None:
    files = BreakableFiles()
    # Poisoning writes to the disk by itself, also when all is over.
    strategy = strategy_at(tier, debug={"poison": False})
    strategy.file_ops = files
    module = built(at(2, lambda module: setattr(files, "fault", fault)))
    with pytest.raises(PageIOError) as caught:
        trainer_with(strategy).fit(module, batches())
    error = caught.value
    found = re.search(what.format(path=re.escape(str(disk))), str(error))
    assert found is not None, error
    assert (error.path, error.page, error.errno) == (str(disk), int(found.group(1)), number)
    assert "training cannot go on: check the disk, then resume from a checkpoint" in str(error)
    assert 2 <= len(module.losses) <= 4
    # The process is as good as new: another run works.
    again = built()
    trainer_with(strategy_at(tier)).fit(again, batches())
    assert torch.equal(torch.stack(again.losses[:2]), torch.stack(module.losses[:2]))


@pytest.mark.parametrize("fault", ["read_error", "write_error"])
@pytest.mark.parametrize("lock_free", [False, True])
@pytest.mark.parametrize("tier", ["masters_on_disk", "three_tiers"])
def test_a_fit_that_a_disk_has_ended_frees_its_memory(strategy_at: Any, tier: str, lock_free: bool, fault: str) -> None:
    """Though the error was raised in a hook of a backward: its traceback holds the loss, whose graph holds the run in C++."""
    engines = []

    def break_disk(module: Stack) -> None:
        engines.append(weakref.ref(module.trainer.strategy.engine))  # type: ignore[attr-defined]
        # By the end of the forward, so that updates, or what a backward waits for, find the fault.
        module.blocks[-1].register_forward_hook(lambda *_: setattr(files, "fault", fault))

    strategy = strategy_at(tier, debug={"poison": False}, lock_free=lock_free)
    strategy.file_ops = files = BreakableFiles()
    module = built(at(2, break_disk))
    try:
        trainer_with(strategy).fit(module, batches())
    except PageIOError:
        pass
    else:
        pytest.fail("the fault was not met")
    del strategy, module
    for _ in range(3):  # what a graph held is found only once the graph has gone
        gc.collect()
    assert engines[0]() is None


# -- NaN --------------------------------------------------------------------------------------------------------------


class TurnsNaN(Stack):
    """The loss of step 2 is NaN."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch * torch.nan if index == 2 else batch, index)


@pytest.mark.parametrize("tier", EVERYWHERE)
def test_lightnings_anomaly_detection_finds_nan(strategy_at: Any, tier: str) -> None:
    module = TurnsNaN()
    with pytest.raises(RuntimeError, match=r"Function '\w+Backward0' returned nan values"):
        trainer_with(strategy_at(tier), detect_anomaly=True).fit(module, batches())
    assert len(module.losses) == 3


@pytest.mark.parametrize("tier", EVERYWHERE)
def test_early_stopping_stops_at_nan(strategy_at: Any, tier: str) -> None:
    module = TurnsNaN()
    stop = EarlyStopping("loss", check_finite=True, check_on_train_epoch_end=True)
    trainer_with(strategy_at(tier), callbacks=[stop], max_epochs=5, limit_train_batches=3).fit(module, batches())
    assert len(module.losses) == 3
    assert "loss = nan is not finite" in str(stop.stopping_reason_message)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupts_as_before() -> Iterator[None]:
    """Lightning ignores SIGINT once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(module: Stack) -> None:
    raise KeyboardInterrupt


class InterruptedInBackward(Stack):
    """By a hook in the middle of step 2's backward pass."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 2:
            self.blocks[1].up.bias.register_hook(interrupt)
        return loss


@pytest.mark.parametrize("tier", EVERYWHERE)
def test_an_interrupt_between_steps_keeps_the_weights(strategy_at: Any, tier: str, interrupts_as_before: None) -> None:
    module, expected = built(at(2, interrupt)), built()
    with pytest.raises(SystemExit) as stop:
        trainer_with(strategy_at(tier)).fit(module, batches())
    assert stop.value.code == 1
    trainer_with(strategy_at("ram"), max_steps=2).fit(expected, batches())
    for (name, weight), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, theirs), name


@pytest.mark.parametrize("tier", EVERYWHERE)
def test_an_interrupt_in_mid_step_ends_the_run(strategy_at: Any, tier: str, interrupts_as_before: None) -> None:
    module = InterruptedInBackward()
    with pytest.raises(SystemExit):
        trainer_with(strategy_at(tier)).fit(module, batches())
    assert len(module.losses) == 3
    assert all(torch.isfinite(weight).all() for weight in module.parameters())


SCRIPT = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests in the background has it ignored
import lightning as L, torch
import lightning_ptm
from torch import nn
from torch.utils.data import DataLoader

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    def training_step(self, batch, index):
        if index == 3:
            print("running", flush=True)
        return self.blocks(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

strategy = lightning_ptm.AngelPTMStrategy(
    page_size="64KiB", disk_path=sys.argv[1], offload_optimizer="disk", offload_parameters="disk")
trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=-1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
try:
    trainer.fit(Module(), DataLoader(torch.randn(64, 64), 4))
finally:
    print("threads:", *(thread.name for thread in threading.enumerate() if thread.name.startswith("ptm")), flush=True)
"""


def test_ctrl_c(disk: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(script), str(disk)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        printed = []
        while "running" not in (line := process.stdout.readline()):
            assert line, "".join(printed)
            printed.append(line)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, rest
    assert "Detected KeyboardInterrupt" in rest
    assert "threads:\n" in rest
    assert "Traceback" not in rest
    assert list(disk.iterdir()) == []


# -- parameters -------------------------------------------------------------------------------------------------------


def _prune(module: Stack) -> None:
    module.blocks[1].up.weight.data = torch.zeros(128, 64)
    module.blocks[1].up.bias.data = torch.zeros(128)
    module.blocks[1].down.weight.data = torch.zeros(64, 128)


def _replace(module: Stack) -> None:
    module.blocks[1].up.weight.data = torch.ones(256, 64)


@torch.no_grad()
def _write(module: Stack) -> None:
    module.blocks[1].up.weight.mul_(0.5)


def test_a_parameter_that_changes_shape(strategy_at: Any) -> None:
    with pytest.warns(UserWarning, match="blocks.1.down.weight have another shape than the states of AdamW"):
        trainer_with(strategy_at("ram"), precision="32-true").fit(built(at(2, _prune)), batches())


def _prune_what_is_only_read(module: Stack) -> None:
    with module.trainer.strategy.gathered(module, write=False):
        _prune(module)


def test_a_parameter_that_changes_shape_where_edits_are_not_kept(strategy_at: Any) -> None:
    with pytest.raises(UsageError) as caught:
        trainer_with(strategy_at("masters_on_disk")).fit(built(at(2, _prune_what_is_only_read)), batches())
    message = str(caught.value)
    assert "parameter blocks.1.up.weight had shape (256, 64) at set-up and has (128, 64) now" in message
    assert "change shapes between two batches, inside `with strategy.gathered(module):`" in message


def test_a_parameter_whose_data_is_replaced(strategy_at: Any) -> None:
    """Without the error, the run would continue as if nothing had been written."""
    with pytest.raises(UsageError) as caught:
        sharded = strategy_at("ram", checkpoints={"state_dict_type": "sharded"})  # which writes pages
        trainer_with(sharded, precision="32-true").fit(built(at(2, _replace)), batches())
    assert "the data of parameter blocks.1.up.weight was replaced" in str(caught.value)
    assert "edit parameters inside `with strategy.gathered(module):`" in str(caught.value)


@pytest.mark.slow_unless("ram", "masters_on_disk-_replace", "all_on_disk-_prune", "all_on_disk-_write")
@pytest.mark.parametrize("change", [_prune, _replace, _write])
@pytest.mark.parametrize("tier", EVERYWHERE)
def test_a_parameter_that_user_code_changes(strategy_at: Any, tier: str, change: Callable[[Stack], None]) -> None:
    """Nothing but a copy would have the new values, and the next update would overwrite it."""
    with pytest.raises(UsageError) as caught:
        trainer_with(strategy_at(tier), precision="bf16-mixed").fit(built(at(2, change)), batches())
    assert "blocks.1.up.weight was read or written outside of its module's forward" in str(caught.value)
    assert "edit weights inside `with trainer.strategy.gathered(module):`" in str(caught.value)


class WritesInTheStep(Stack):
    """A write in a place where the copy that computes may be read."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        _write(self)
        return super().training_step(batch, index)


def test_a_parameter_that_is_written_to_in_a_step(strategy_at: Any) -> None:
    with pytest.raises(UsageError) as caught:
        trainer_with(strategy_at("ram"), precision="bf16-mixed").fit(WritesInTheStep(), batches())
    assert "the data of parameter blocks.1.up.weight was written to, and it is a copy of values in pages" in str(
        caught.value
    )


def test_a_parameter_in_ram_alone_may_be_written_to(strategy_at: Any) -> None:
    """In a true precision it is the truth, wherever nothing else keeps states of it."""
    module = built(at(2, _write))
    trainer_with(strategy_at("ram"), precision="32-true").fit(module, batches())
    unwritten = built()
    trainer_with(strategy_at("ram"), precision="32-true").fit(unwritten, batches())
    assert not torch.equal(module.blocks[1].up.weight, unwritten.blocks[1].up.weight)


class UsesAWeightDirectly(Stack):
    """From step 1 on, reads a weight of block 1 outside of it, beside a call of the block or without one."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, batch: Tensor) -> Tensor:
        if not self.losses:
            return super().forward(batch)
        outputs = self.blocks[0](batch)
        inner = nn.functional.linear(outputs, self.blocks[1].up.weight)[:, :64]
        return self.blocks[2](self.blocks[1](outputs) + inner if self.beside else inner)


@pytest.mark.slow_unless(
    "all_on_disk-none-True", "all_on_disk-all-False", "three_tiers-none-False", "three_tiers-all-True"
)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("tier", AWAY)
def test_weights_that_are_used_outside_their_module(strategy_at: Any, tier: str, recompute: str, beside: bool) -> None:
    module = UsesAWeightDirectly(beside=beside)
    with pytest.raises(UsageError) as caught:
        trainer_with(strategy_at(tier, recompute=recompute)).fit(module, batches())
    assert "blocks.1.up.weight was read or written outside of its module's forward" in str(caught.value)
    assert "to compute with it, call the module that it belongs to, or make a larger module a unit" in str(caught.value)
    assert len(module.losses) == 1


def test_weights_that_never_leave_may_be_used_directly(strategy_at: Any) -> None:
    module = UsesAWeightDirectly(beside=False)
    trainer_with(strategy_at("ram")).fit(module, batches())
    assert torch.isfinite(torch.stack(module.losses)).all()


def test_weights_that_an_update_may_be_changing_are_not_used_directly(strategy_at: Any) -> None:
    module = UsesAWeightDirectly(beside=False)
    with pytest.raises(UsageError, match=r"blocks.1.up.weight was read or written outside of its module's forward"):
        trainer_with(strategy_at("masters_on_disk")).fit(module, batches())
    assert len(module.losses) == 1


# -- graphs -----------------------------------------------------------------------------------------------------------


class DoubleBackward(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, index)
        self.manual_backward(loss, create_graph=True)


class GradientPenalty(Stack):
    """Asks for gradients of gradients with regard to the input."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        batch = batch.requires_grad_()
        loss = super().training_step(batch, index)
        (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + gradient.square().sum()


@pytest.mark.parametrize("build", [DoubleBackward, GradientPenalty])
@pytest.mark.parametrize("tier", EVERYWHERE)
def test_double_backward_is_refused(strategy_at: Any, tier: str, build: type[Stack]) -> None:
    module = build()
    with pytest.raises(UsageError) as caught:
        trainer_with(strategy_at(tier), "32-true").fit(module, batches())
    message = str(caught.value)
    assert "backward with create_graph=True (double backward) was started" in message
    assert "a unit's parameters may be released before the second pass reads them" in message
    assert "another strategy, such as 'ddp'" in message
    assert len(module.losses) == 1
