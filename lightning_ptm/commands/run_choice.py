"""The choice of `parallel="auto"` for a run that begins: this machine is measured by all ranks, and rank 0 chooses.

Owns nothing after it has returned. The run's module stays as it is, and so do random generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ptm.commands.choice import as_settings, choose
from lightning_ptm.commands.choice_report import words
from lightning_ptm.commands.collectives import Launch
from lightning_ptm.commands.own_module import trained
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.probe import measured
from lightning_ptm.config import Settings
from lightning_ptm.data import SpanCorruption, TextBytes
from lightning_ptm.errors import ConfigError, RankError, one_line
from lightning_ptm.forecasting import hardware
from lightning_ptm.forecasting.estimate import example_batch
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.torch_internals import tree_map
from lightning_ptm.trainer.between_runs import RunChoice
from lightning_ptm.trainer.internals import train_source
from lightning_ptm.trainer.pipelined import refuse_in_stages
from lightning_ptm.trainer.ranks import RankPlace


def choose_for_run(
    trainer: Trainer, module: LightningModule, settings: Settings, place: RankPlace, meet: Callable[[], None]
) -> RunChoice:
    """Chooses the settings of a fit that begins; those of the user that are not the defaults stay. Collective.

    Args:
        settings: the settings of the strategy; those that decide the choice are equal on all ranks.
        meet: waits for the other ranks, and raises if one of them has failed.

    Raises:
        ConfigError: the run cannot be planned before it is set up, or not at all; on all ranks, or a RankError on the others.
        CapacityError: nothing that was tried fits.
    """
    with isolate_rng():
        batch = _batch_of(trainer, module)
        meet()  # data of one rank alone may have failed
        launch = None
        if not place.alone:
            local_rank = place.backend.device.index or place.rank % place.ranks_here
            launch = Launch(place.rank, local_rank, place.world_size, place.ranks_here)
        text = measured(settings.disk_paths, launch)
        found: RunChoice | str = ""
        failure: Exception | None = None
        if text is not None:
            try:
                found = _chosen(trainer, module, settings, place, batch, text)
            except Exception as error:  # also of the user's model; raised below, once it has been broadcast
                failure, found = error, one_line(error)
    if not place.alone:
        box = [found]
        torch.distributed.broadcast_object_list(box, 0)
        found = box[0]
    if failure is not None:
        raise failure
    if isinstance(found, str):
        raise RankError(
            f"parallel='auto' failed: rank 0 could not choose ({found}), so nothing was started; look for rank 0's error"
        )
    return found


def _chosen(
    trainer: Trainer, module: LightningModule, settings: Settings, place: RankPlace, batch: Any, text: str
) -> RunChoice:
    default = Settings()
    given = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name != "parallel" and getattr(settings, field.name) != getattr(default, field.name)
    }
    node = hardware.parsed(text, Path("this machine"), None)
    arguments = {
        "precision": trainer.precision,
        "max_steps": trainer.max_steps,
        "gradient_clip_val": trainer.gradient_clip_val,
    }

    def make(sizes: Mapping[str, Any], accumulate: int) -> PlannedRun:
        if sizes.get(Axis.STAGE.setting, 1) > 1:
            refuse_in_stages(trainer.callbacks)  # type: ignore[attr-defined]
        model, _ = trained(module)
        run = {**arguments, "accumulate_grad_batches": accumulate}
        return PlannedRun(model, batch, run, {**given, **sizes}, node)

    try:
        choice = choose(
            make,
            type(module).__name__,
            node,
            place.nodes,
            given,
            accumulate=trainer.accumulate_grad_batches,
            equal_steps=False,
        )
    except ConfigError as error:
        raise ConfigError(
            f"parallel='auto' compares plans of runs, and {type(module).__name__} cannot be planned: {error}; leave parallel "
            f"out, and give sizes, recompute and offload_activations where the defaults do not suit"
        ) from error
    best = choice.ranked[0]
    changes = ", ".join(f"{name}={value!r}" for name, value in choice.changes.items()) or "the defaults"
    said = (
        f"parallel='auto' chose {changes} ({words(best.values, place.world_size)}): {best.prediction.seconds:.3g} s a step "
        f"predicted, {choice.predicted} of {choice.candidates} candidates compared"
    )
    if choice.no_stages:
        said += f", none with pipeline stages ({choice.no_stages.partition(';')[0]})"
    return RunChoice(as_settings(choice.changes, settings), said)


def _batch_of(trainer: Trainer, module: LightningModule) -> Any:
    """Returns a training batch on the meta device.

    Raises:
        ConfigError: the shapes of a batch are unknown before data are set up.
    """
    source = train_source(trainer)
    if isinstance(source, (SpanCorruption, TextBytes)):
        return example_batch(source)
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        kind = type(source.dataset if isinstance(source, DataLoader) else source).__name__
        raise ConfigError(
            f"parallel='auto' chooses before data are set up, and the shapes of a batch of {kind} are unknown then; give a "
            f"DataLoader of a data set with indices, or give sizes, such as those of `lightning-ptm plan --parallel auto`"
        )
    try:
        batch = source.collate_fn(_items(source))
    except Exception as error:  # a user's data set may raise anything
        raise ConfigError(
            f"parallel='auto' needs a training batch, and {type(source.dataset).__name__} gives none yet "
            f"({type(error).__name__}: {error}); make its data available before fit, or give sizes"
        ) from error
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)


def _items(loader: DataLoader[Any]) -> Any:
    """Returns the first samples of a loader's data set, as many as a batch has."""
    data: Any = loader.dataset
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:  # the data set has batches
        return data[0]
    return [data[index % len(data)] for index in range(size)]
