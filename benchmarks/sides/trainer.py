"""Lightning's Trainer, with its own single-device strategy or with this project's, on one LightningModule.

Options: `shape`, `batch` (of each rank), `seed`, `precision`; `settings` are AngelPTMStrategy's arguments, absent for
Lightning's own strategy; `devices`; `device` "cpu" or "cuda"; `meta` true builds the model on the meta device in
`configure_model`, to be initialised by `init_weights` one submodule at a time; `disk_bytes_per_s` a speed that the disk is
slowed down to; `text` true trains on real text; `accumulate` batches make a step, 1 by default. The memory that was resident
before anything was built, and the mean loss of the turn's steps, are among a turn's extra numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.earlier_settings import for_version
from benchmarks.gpt import GPT, GPTShape, adamw, batches, build, init_weights, text_batches
from benchmarks.race import Baton, current_rss_bytes
from benchmarks.sides.devices import peaks
from benchmarks.slow_disk import SlowDisks


class GPTModule(LightningModule):
    """The benchmarks' GPT as a user would wrap it.

    Args:
        divided: whether each rank may have a part of the tokens.
    """

    def __init__(self, shape: GPTShape, *, seed: int, meta: bool, divided: bool = False) -> None:
        super().__init__()
        self.divided = divided
        self.shape = shape
        self.model = None if meta else build(shape, dtype=torch.float32, seed=seed)

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = GPT(self.shape)

    def init_weights(self, module: torch.nn.Module) -> None:
        init_weights(module)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        positions = self.trainer.strategy.positions(batch[0].shape[1]) if self.divided else None  # type: ignore[attr-defined]
        loss: Tensor = self.model(*batch, positions)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches, of random tokens or of text: each rank has its own, or each `group` of ranks."""

    def __init__(self, shape: GPTShape, *, batch: int, seed: int, group: int = 1, text: bool = False) -> None:
        self.text = text
        self.group = group
        self.shape = shape
        self.batch = batch
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        make = text_batches if self.text else batches
        return make(self.shape, batch=self.batch, seed=self.seed + rank // self.group)


class Pacer(Callback):
    """Makes the training loop wait at the end of its turn for the next one, and end with the race."""

    def __init__(self, baton: Baton, *, count_disk: bool, empty_rss_bytes: int, accumulate: int = 1) -> None:
        self.baton = baton
        self.accumulate = accumulate
        self.count_disk = count_disk
        self.empty_rss_bytes = empty_rss_bytes
        self.left = self.steps = 0
        self.before: dict[str, float] = {}
        self.losses: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.before = disk_numbers(trainer.strategy) if self.count_disk else {}
        self.baton.ready()
        self._wait(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"])
        if (batch_idx + 1) % self.accumulate:
            return
        self.left -= 1
        if self.baton.stepped() and self.count_disk:
            self.before = disk_numbers(trainer.strategy)
        if self.left == 0:
            now = disk_numbers(trainer.strategy) if self.count_disk else {}
            spent = {name: value - self.before.get(name, 0.0) for name, value in now.items()}
            if "reads" in spent:
                spent["mean_staleness"] = spent["total_staleness"] / spent["reads"]
                spent["max_staleness"] = now["max_staleness"]  # of the whole run
            spent["empty_rss_bytes"] = float(self.empty_rss_bytes)
            spent["mean_loss"] = float(
                torch.stack(self.losses).mean()
            )  # waits for the device, whose work is the turn's
            spent |= self.numbers()
            loss = float(outputs["loss"])
            self.baton.report(loss, spent | peaks(trainer.strategy.root_device.type))
            self.before = now
            self._wait(trainer)

    def numbers(self) -> dict[str, float]:
        """Returns more numbers of the turn that ends, which has had `self.steps` steps."""
        return {}

    def _wait(self, trainer: Trainer) -> None:
        self.losses.clear()
        self.left = self.steps = self.baton.wait()
        trainer.should_stop = self.left == 0


def disk_numbers(strategy: Strategy) -> dict[str, float]:
    """Returns what this project's strategy has counted on its links to and from the disk since the run began.

    `read` is from disk, `written` to it, `parameter_read_bytes` of parameters that compute needed; busy is the time with at
    least one such transfer in flight, `disk_busy_s` with any of either kind.
    """
    import lightning_ptm
    from lightning_ptm.terms import Tier

    assert isinstance(strategy, lightning_ptm.AngelPTMStrategy)
    numbers = {"read_page_bytes": 0.0, "read_busy_s": 0.0, "written_page_bytes": 0.0, "written_busy_s": 0.0}
    numbers["parameter_read_bytes"] = 0.0
    numbers["disk_busy_s"] = strategy.engine.allocator.disk_stats().busy_s
    staleness = strategy.statistics().staleness
    if staleness is not None:
        numbers |= {"reads": float(staleness.reads), "total_staleness": float(staleness.total)}
        numbers["max_staleness"] = float(staleness.maximum)
    for (source, target), link in strategy.engine.allocator.stats().items():
        if (source is Tier.DISK) != (target is Tier.DISK):
            verb = "read" if source is Tier.DISK else "written"
            numbers[f"{verb}_page_bytes"] += link.bytes
            numbers[f"{verb}_busy_s"] += link.busy_s
        if source is Tier.DISK and target is Tier.DEVICE:
            numbers["parameter_read_bytes"] += link.bytes
    return numbers


def make_strategy(settings: dict[str, Any] | None) -> Strategy | str:
    """Returns this project's strategy, in the version that is installed, with `settings`; for None Lightning's own."""
    if settings is None:
        return "auto"
    import lightning_ptm
    from lightning_ptm.config import Settings

    if settings.get("tensor_parallel_size", 1) > 1:
        from lightning_ptm import parallel

        if hasattr(parallel, "ColwiseParallel"):
            colwise, rowwise = parallel.ColwiseParallel, parallel.RowwiseParallel
        else:  # until 26 November 2026
            colwise, rowwise = parallel.Columns, parallel.Rows
        rules = {
            "attention.qkv": colwise(parts=3, heads="heads"),
            "attention.out": rowwise(),
            "up": colwise(),
            "down": rowwise(),
        }
        plan = {f"model.blocks.*.{name}": rule for name, rule in rules.items()}
        settings = {**settings, "tensor_parallel": {**(settings.get("tensor_parallel") or {}), "plan": plan}}
    known = [field.name for field in dataclasses.fields(Settings)]
    strategy: Strategy = lightning_ptm.AngelPTMStrategy(**for_version(settings, known))
    return strategy


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    strategy = make_strategy(options.get("settings"))
    if "disk_bytes_per_s" in options:
        strategy.file_ops = SlowDisks(options["disk_bytes_per_s"])  # type: ignore[union-attr]
    empty = current_rss_bytes()
    shape = GPTShape(**options["shape"])
    settings = options.get("settings") or {}
    divided = settings.get("context_parallel_size", 1)
    module = GPTModule(shape, seed=options["seed"], meta=options.get("meta", False), divided=divided > 1)
    group = divided * settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    data = Batches(shape, batch=options["batch"], seed=options["seed"], group=group, text=options.get("text", False))
    accumulate = options.get("accumulate", 1)
    pacer = Pacer(baton, count_disk="settings" in options, empty_rss_bytes=empty, accumulate=accumulate)
    trainer = Trainer(
        accelerator=options.get("device", "cpu"),
        devices=options.get("devices", 1),
        strategy=strategy,
        precision=options["precision"],
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[pacer],
        logger=False,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
