"""The model, batch and layout request of a run on the meta device, for `plan`.

Builds the Trainer and the optimizers that a run would build, and allocates no parameter.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ptm.commands.configured import builder
from lightning_ptm.commands.own_module import with_adapters
from lightning_ptm.commands.params import build_on_meta
from lightning_ptm.commands.search import takes_argument
from lightning_ptm.config import DEFAULT_PAGE_BYTES, Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.counting import Anatomy, Divided, UnitWork
from lightning_ptm.forecasting.estimate import estimate, example_batch, resized
from lightning_ptm.forecasting.node import Node
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.runtime.autograd.token_slices import token_slices_of
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.trainer.pipelined import check_trains_in_stages
from lightning_ptm.trainer.precision import AngelPTMPrecision
from lightning_ptm.trainer.strategy import AngelPTMStrategy

_ANY_STEPS = 1000
"""Steps to assume if a config has no limit; only learning rate schedules depend on it."""
_DEPTH = "layers"
"""The argument of our models that makes them deeper but not wider."""


class PlannedRun:
    """A model, a batch and the layout request of a run with them, on the meta device.

    Attributes:
        deepens: the argument of the model that makes it deeper but not wider; empty if unknown, None if
            the model is of no config.
        group: the stand-in tensor group for whose first rank the model is sliced (`tensor_parallel_size`); None: it is whole.
        precision: the Trainer's.
        steps_after_each_pass: whether the optimizer uses and forgets all gradients after each pass of the loss.
        works: the work of the model's units in a forward, by samples; for all settings.

    Args:
        model: a model on the meta device, which is changed.
        batch: likewise.
        trainer: arguments of the Trainer, as in a config.
        changed: settings of the strategy in place of those of `trainer`.
    """

    def __init__(
        self,
        model: LightningModule,
        batch: Any,
        trainer: Mapping[str, Any],
        changed: Mapping[str, Any],
        node: Node,
        deepens: str | None = None,
    ) -> None:
        self.accumulate: int = trainer.get("accumulate_grad_batches") or 1
        self.precision: Any = trainer.get("precision") or "32-true"
        self.deepens = deepens
        self.model = model
        self.batch = batch
        self.group: CountedTensorGroup | None = None
        self.works: dict[int, tuple[UnitWork, ...]] = {}
        self.steps_after_each_pass = False
        self._in_stages = False
        self.request: Request = self._request(trainer, changed, node)

    @property
    def divided(self) -> Divided:
        """The part of the sequences that a rank computes."""
        settings = self.request.settings
        return Divided(settings.context_parallel_size, settings.context_parallel)

    @classmethod
    def of_config(
        cls,
        document: Mapping[str, Any],
        path: str | Path,
        changed: Mapping[str, Any],
        node: Node,
        *,
        adapter_rank: int = 0,
    ) -> PlannedRun:
        """The run of a config; with an `adapter_rank`, of its model with adapters of that rank."""
        model, batch = build_on_meta(document, path), example_batch(_data(document, path))
        if adapter_rank and not with_adapters(model, adapter_rank):
            raise ConfigError(f"the model of {path} has no linear layer that could have an adapter")
        deepens = _DEPTH if takes_argument(document, _DEPTH) else ""
        return cls(model, batch, document.get("trainer") or {}, changed, node, deepens)

    def work(self, blueprint: Blueprint, samples: int, known: Anatomy | None = None) -> tuple[UnitWork, ...]:
        """Returns the work of all units in a forward of so many samples; counted once for all settings.

        Args:
            known: the model's anatomy, if it was looked up before.
        """
        if samples not in self.works:
            self.works[samples] = estimate(
                self.model,
                blueprint.units,
                resized(self.batch, samples),
                self.request.compute,
                blueprint.experts,
                known=known,
                group=self.group,
                divided=self.divided,
                token_slices=token_slices_of(blueprint.units, self.request.settings.slices, blueprint.experts),
            )
        return self.works[samples]

    def share_work(self, works: dict[int, tuple[UnitWork, ...]]) -> None:
        """Has `work` read and add to what another run has counted, whose model is cut alike.

        Args:
            works: the other run's, by samples.
        """
        self.works = works

    def check_once(self, in_stages: Callable[[], None]) -> None:
        """Calls the check that the model computes in pipeline stages, unless it has passed."""
        if not self._in_stages:
            in_stages()
            self._in_stages = True

    def with_settings(self, **changed: Any) -> PlannedRun:
        """Returns this run with other settings of the strategy; not for those that cut layers or divide experts."""
        other = copy.copy(self)
        other.request = dataclasses.replace(
            self.request, settings=dataclasses.replace(self.request.settings, **changed)
        )
        return other

    def accumulating(self, micro_batches: int) -> PlannedRun:
        """Returns this run with so many micro-batches in a step, 2 or more."""
        other = copy.copy(self)
        other.accumulate, other.steps_after_each_pass = micro_batches, False
        other.request = dataclasses.replace(self.request, keep_gradients=True, sums_gradients=True)
        return other

    def _request(self, trainer: Mapping[str, Any], changed: Mapping[str, Any], node: Node) -> Request:
        given = trainer.get("strategy")
        settings = dict(given.get("init_args") or {}) if isinstance(given, Mapping) else {}
        strategy = _class_of(given)(**{**settings, **changed})
        with _lightning_says_nothing():
            here = Trainer(
                accelerator="cpu",
                devices=1,
                strategy=strategy,
                max_epochs=-1,  # so that the length of the data is not needed
                max_steps=trainer["max_steps"] if (trainer.get("max_steps") or -1) > 0 else _ANY_STEPS,
                gradient_clip_val=trainer.get("gradient_clip_val"),
                accumulate_grad_batches=self.accumulate,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        strategy.precision_plugin = precision = AngelPTMPrecision(self.precision)
        here.state.fn = TrainerFn.FITTING
        self.model.trainer = here
        try:
            strategy.connect(self.model)
            strategy.setup_optimizers(here)
            self.steps_after_each_pass = self.accumulate == 1 and precision.steps_after_each_pass(self.model)
            if (stages := strategy.settings.pipeline_parallel_size) > 1:
                check_trains_in_stages(self.model, stages)
            builder, cut = strategy.builder(here), None
            if strategy.settings.tensor_parallel_size > 1:
                self.group = CountedTensorGroup(strategy.settings.tensor_parallel_size)
                cut = builder.cut(self.group, proven=False)
            wanted = strategy.settings
            if wanted.page_size == "auto":
                wanted = dataclasses.replace(wanted, page_size=_page_bytes(node, wanted))
            if wanted.disk_path is None and "disk" in (wanted.offload_parameters, wanted.wanted_offload_optimizer):
                wanted = dataclasses.replace(wanted, disk_path=here.default_root_dir)  # as a run does
            return builder.request(wanted, cut)
        finally:
            self.model.trainer = None


@contextmanager
def _lightning_says_nothing() -> Iterator[None]:
    """Silences Lightning's messages about loggers and accelerators."""
    said = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    before = said.level
    said.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.setLevel(before)


def _class_of(given: object) -> type[AngelPTMStrategy]:
    """The config's strategy class if it is a subclass of AngelPTMStrategy, which may have tiers of its own; else ours."""
    path = str(given.get("class_path", "")) if isinstance(given, Mapping) else ""
    module, _, name = path.rpartition(".")
    try:
        named = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        named = None
    return named if isinstance(named, type) and issubclass(named, AngelPTMStrategy) else AngelPTMStrategy


def _page_bytes(node: Node, settings: Settings) -> int:
    """The page size that a run would measure."""
    if node.page_size is not None:
        return node.page_size
    if not node.has_own_memory and not settings.disk_paths:
        return DEFAULT_PAGE_BYTES
    raise ConfigError(
        f"page_size is 'auto', for which a run measures the rates of disk and GPU with pages of each size, "
        f"and {node.source} has no page_size; run `lightning-ptm probe` on such a "
        f"machine, or plan with --strategy '{{page_size: 4MiB}}'"
    )


def _data(document: Mapping[str, Any], path: str | Path) -> LightningDataModule:
    if not isinstance(document.get("data"), Mapping):
        raise ConfigError(f"{path} names no data, so the shape of a batch is not known; it needs data.class_path")
    return builder(LightningDataModule, "data", document["data"], path)()
