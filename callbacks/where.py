"""Where a callback finds the strategy, the logs and a folder for its files.

Owns nothing. Public names of lightning_ptm only.
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_ptm import AngelPTMStrategy


def pages_of(trainer: Trainer) -> AngelPTMStrategy | None:
    """The Trainer's strategy if it keeps model states in pages; None for others, with which page callbacks do nothing."""
    return trainer.strategy if isinstance(trainer.strategy, AngelPTMStrategy) else None


def boards_of(trainer: Trainer) -> list[TensorBoardLogger]:
    """The Trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def folder_of(trainer: Trainer) -> Path:
    """The first logger's folder, or the Trainer's root folder; made if need be. Rank 0 only."""
    # Lightning's DummyLogger (fast_dev_run, the Tuner) answers to any name, with a method.
    named = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
    found = next((each for each in named if isinstance(each, (str, os.PathLike)) and each), None)
    folder = Path(found or trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def own_name(trainer: Trainer, callback: Callback, name: str) -> str:
    """`name` for the Trainer's first callback of a class; `name_2`, before a file's ending, for its second..."""
    of_kind = [each for each in trainer.callbacks if type(each) is type(callback)]  # type: ignore[attr-defined]
    place = next((number for number, each in enumerate(of_kind) if each is callback), 0)
    stem, dot, ending = name.partition(".")
    return name if place == 0 else f"{stem}_{place + 1}{dot}{ending}"


def show_text(trainer: Trainer, tag: str, markdown: str) -> None:
    """A text page in TensorBoard, if a logger is one; loggers write on rank 0 alone."""
    if trainer.is_global_zero:
        for logger in boards_of(trainer):
            logger.experiment.add_text(tag, markdown, trainer.global_step)


def preformatted(text: str) -> str:
    """`text` as markdown that keeps its columns."""
    return "".join(f"    {line}\n" for line in text.splitlines())
