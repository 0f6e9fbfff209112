"""Lookup of the strategy, its settings, the loggers and a folder for files, for callbacks.

Owns nothing. Uses public names of lightning_ptm only.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info

from lightning_ptm import AngelPTMStrategy

LOGS = "lightning_ptm_logs"
"""The folder for files of a run without a logger, in the Trainer's root folder."""


def pages_of(trainer: Trainer) -> AngelPTMStrategy | None:
    """The Trainer's strategy if it keeps model states in pages; None for others, with which page callbacks do nothing."""
    return trainer.strategy if isinstance(trainer.strategy, AngelPTMStrategy) else None


def settings_of(strategy: AngelPTMStrategy) -> dict[str, Any]:
    """The strategy's settings by name, those of a nested dataclass as `lock_free.max_staleness`."""
    return dict(_fields(strategy.settings))


def _fields(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def boards_of(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def folder_of(trainer: Trainer) -> Path | None:
    """The folder for files: the first logger's; without a logger, LOGS in the Trainer's root folder. None for runs that must
    not write files (fast_dev_run, the Tuner)."""
    loggers = trainer.loggers
    if trainer.fast_dev_run or (loggers and all(isinstance(logger, DummyLogger) for logger in loggers)):  # type: ignore[attr-defined]
        return None
    for logger in loggers:
        folder = getattr(logger, "log_dir", None)
        if isinstance(folder, (str, os.PathLike)) and folder:
            return Path(folder)
    for logger in loggers:
        if isinstance(logger.save_dir, (str, os.PathLike)) and logger.save_dir:
            # A folder per run, the one that Lightning uses for checkpoints with such a logger.
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            return Path(logger.save_dir, str(logger.name), version)
    return Path(trainer.default_root_dir, LOGS)


def file_of(trainer: Trainer, callback: Callback, name: str) -> Path | None:
    """The path of a callback's file, with its folder made if needed; None if no files should be written. Rank 0 only.

    A new file is announced if no logger has determined the folder.
    """
    folder = folder_of(trainer)
    if folder is None:
        return None
    stem, dot, ending = name.partition(".")
    number, loop = place_of(trainer, callback), loop_of(trainer)
    path = folder / f"{stem}{f'_{number}' if number > 1 else ''}{f'_{loop}' if loop else ''}{dot}{ending}"
    folder.mkdir(parents=True, exist_ok=True)
    if not trainer.loggers and not path.exists():
        rank_zero_info(f"{type(callback).__name__} writes {path.absolute()}")
    return path


def place_of(trainer: Trainer, callback: Callback) -> int:
    """1 for the Trainer's first callback of a class, 2 for its second..."""
    of_kind = [each for each in trainer.callbacks if type(each) is type(callback)]  # type: ignore[attr-defined]
    return next((number for number, each in enumerate(of_kind, 1) if each is callback), 1)


def loop_of(trainer: Trainer) -> str:
    """ "validate", "test" or "predict"; empty in fit, whose names have no suffix."""
    loop = trainer.state.fn
    return "" if loop is None or loop == "fit" else loop.value


def own_name(trainer: Trainer, callback: Callback, name: str) -> str:
    """`name` for the Trainer's first callback of a class, `name_2` for its second..."""
    number = place_of(trainer, callback)
    return name if number == 1 else f"{name}_{number}"


def loop_tag(trainer: Trainer, tag: str) -> str:
    """`tag`, or `tag/<loop>` outside fit, which keeps it apart from fit's."""
    loop = loop_of(trainer)
    return f"{tag}/{loop}" if loop else tag


def show_text(trainer: Trainer, tag: str, markdown: str) -> None:
    """Adds a text to TensorBoard, if there is such a logger; only rank 0 writes."""
    if trainer.is_global_zero:
        for logger in boards_of(trainer):
            logger.experiment.add_text(tag, markdown, trainer.global_step)


def preformatted(text: str) -> str:
    """`text` as markdown that keeps its columns."""
    return "".join(f"    {line}\n" for line in text.splitlines())
