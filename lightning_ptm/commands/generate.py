"""`lightning-ptm generate --ckpt X --prompt "..."`: continues a text with a trained GPT, also one that is larger than RAM.

Decides what the model is (the checkpoint's hyper-parameters, then the config's) and whether the checkpoint is of it, from
names and shapes; then it is `Trainer.predict` with the strategy, which fetches weights unit by unit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import models
from lightning_ptm.commands.configured import builder
from lightning_ptm.config import Settings
from lightning_ptm.data.text import TEXT_END, decode, encode
from lightning_ptm.errors import AngelPTMError, CheckpointError, ConfigError, some
from lightning_ptm.models import GPT, Sampling
from lightning_ptm.storage.source import Source
from lightning_ptm.trainer.registered import NAMES
from lightning_ptm.trainer.strategy import AngelPTMStrategy

BYTES = 256
"""Tokens of a model that reads bytes."""

STDIN = "-"

"""In an error's text, of each kind."""


def read_prompt(prompt: str, model: GPT) -> Tensor:
    """The tokens of a prompt, those of standard input for STDIN; says so if the model reads only the last of them."""
    tokens = encode(_standard_input() if prompt == STDIN else prompt)
    if len(tokens) > model.sequence_length:
        _say(
            f"the prompt has {len(tokens)} bytes and the model reads {model.sequence_length}: only the last "
            f"{model.sequence_length} count"
        )
    return tokens if len(tokens) else encode(bytes([TEXT_END]))


def continue_text(
    trainer: Trainer, model: GPT, tokens: Tensor, sampling: Sampling, ckpt: Path, *, weights_only: bool
) -> None:
    """Prints what follows `tokens`, and on standard error how long it took."""
    printed = _Printed()
    model.sampling, model.told = sampling, printed
    with _quiet(), _while_read():
        loader: DataLoader[Any] = DataLoader([tokens[None]], batch_size=1, collate_fn=_only)  # type: ignore[arg-type]
        trainer.predict(model, loader, ckpt_path=ckpt, return_predictions=False, weights_only=weights_only)
    printed.end()


def built_for(source: Source, document: Mapping[str, Any], config_file: str | None) -> GPT:
    """The model of a checkpoint, its parameters on the meta device where its class can do that.

    The checkpoint's hyper-parameters count, where it has any; `document`, a config of `fit`, gives what they leave open.

    Raises:
        ConfigError: neither says what the model is, they contradict each other, or it continues no text.
        CheckpointError: the checkpoint is of another model.
    """
    saved = dict(source.dictionary.get("hyper_parameters") or {})
    saved.pop("_instantiator", None)
    saved_class = saved.pop("_class_path", None)
    given = document.get("model") or {}
    given_class = given.get("class_path")
    if not saved and not given:
        raise ConfigError(
            f"{source.path} was saved without hyper-parameters, so the sizes of its model are not known; give the config of "
            f"the run that saved it: --config gpt.yaml"
        )
    if saved_class and given_class and _short(saved_class) != _short(given_class):
        raise ConfigError(
            f"{source.path} is of a {saved_class} and the model of {config_file} is a {given_class}; give the config of the "
            f"run that saved it, or none"
        )
    class_path = given_class or saved_class or f"{GPT.__module__}.{GPT.__name__}"
    if not given_class and _short(class_path).partition(".")[0] != "lightning_ptm":
        # A checkpoint may be anybody's: what it names is not imported unless a config names it, too.
        raise ConfigError(
            f"{source.path} is of a {class_path}, which is not a model of lightning_ptm; give the config that names it: "
            f"--config FILE"
        )
    found = _instantiate(class_path, {**(given.get("init_args") or {}), **saved}, f"{config_file or source.path}")
    if not isinstance(found, GPT):
        raise ConfigError(
            f"{source.path} is of a {type(found).__name__}, which continues no text; generate works with "
            f"lightning_ptm.models.GPT and classes derived from it"
        )
    if found.vocab_size != BYTES:
        raise ConfigError(
            f"the model of {source.path} has {found.vocab_size} tokens, and generate reads and writes bytes, which are "
            f"{BYTES}; give tokens of your own to GPT.generate, or to trainer.predict"
        )
    found.configure_model()
    _check(source, found)
    return found


def _instantiate(class_path: str, arguments: dict[str, Any], where: str) -> LightningModule:
    known = getattr(models, class_path.rpartition(".")[2], None)
    if inspect.isclass(known) and "meta" in inspect.signature(known).parameters:
        arguments = {**arguments, "meta": True}
    return builder(LightningModule, "model", {"class_path": class_path, "init_args": arguments}, where)()


def _short(class_path: str) -> str:
    """`lightning_ptm.models.gpt.GPT` and `lightning_ptm.models.GPT` are one class."""
    package, _, name = class_path.rpartition(".")
    return f"{models.__name__}.{name}" if package.startswith(models.__name__) else class_path


def _check(source: Source, model: GPT) -> None:
    """Names and shapes are those of the checkpoint."""
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: weight.shape for weight in source.weights for name in weight.names}
    differing = [
        f"{name} is {theirs[name]} there and {shape} here"
        for name, shape in ours.items()
        if theirs.get(name, shape) != shape
    ]
    found = [
        _listed("it lacks", [name for name in ours if name not in theirs]),
        _listed("it has", [name for name in theirs if name not in ours]),
        _listed("shapes differ:", differing),
    ]
    if any(found):
        raise CheckpointError(
            f"{source.path} is of another model than this {type(model).__name__}: {'; '.join(filter(None, found))}. Nothing "
            f"was generated; give the config of the run that saved it with --config"
        )


def _listed(what: str, names: list[str]) -> str:
    return f"{what} {some(names)}" if names else ""


def trainer_for(
    document: Mapping[str, Any], precision: str | None, accelerator: str | None, changed: Mapping[str, Any]
) -> Trainer:
    """One rank, and nothing beside the text."""
    trainer = document.get("trainer") or {}
    settings = {**_settings(trainer.get("strategy")), **changed}
    # The checkpoint has the weights; and what they are afterwards nobody asks.
    settings |= {"weights": None, "restore_weights": False}
    strategy = AngelPTMStrategy(**settings)
    try:
        with _quiet():
            return Trainer(
                accelerator=accelerator or trainer.get("accelerator") or "auto",
                devices=1,
                strategy=strategy,
                precision=precision or trainer.get("precision") or "bf16-mixed",  # type: ignore[arg-type]
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    except (ValueError, MisconfigurationException, ModuleNotFoundError) as error:
        if isinstance(error, AngelPTMError):
            raise
        # Lightning's words name the setting, and what it may be.
        raise ConfigError(f"there is no such Trainer, so nothing was generated: {error}") from error


def _settings(strategy: object) -> dict[str, Any]:
    """Those of a config's strategy, if it is ours."""
    if isinstance(strategy, str):
        return dict(NAMES[strategy].settings) if strategy in NAMES else {}
    if isinstance(strategy, Mapping) and str(strategy.get("class_path", "")).endswith(AngelPTMStrategy.__name__):
        names = {field.name for field in dataclasses.fields(Settings)}
        return {name: value for name, value in (strategy.get("init_args") or {}).items() if name in names}
    return {}


class _Printed:
    """Standard output, byte by byte."""

    def __init__(self) -> None:
        self._began_s = perf_counter()
        self._count = 0
        self._ended = False

    def __call__(self, token: Tensor) -> None:
        self._ended = int(token) == TEXT_END
        self._count += 1
        if not self._ended:
            out = sys.stdout.buffer
            out.write(decode(token))
            out.flush()

    def end(self) -> None:
        """Says what it took."""
        seconds = perf_counter() - self._began_s
        if sys.stdout.isatty():
            print(flush=True)
        ended = ", and the text ended" if self._ended else ""
        _say(f"{self._count} bytes in {seconds:.1f} s, the start included: a forward of the model each{ended}")


def _standard_input() -> bytes:
    if sys.stdin.isatty():
        _say("the prompt is read from standard input; end it with ctrl-D (or give --prompt)")
    return sys.stdin.buffer.read()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _only(items: list[Tensor]) -> Tensor:
    return items[0]


@contextlib.contextmanager
def _while_read() -> Iterator[None]:
    """Ends quietly when nobody reads standard output any more (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        # What is still buffered must not fail once more when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of a Trainer that has no logger and of a loader without workers."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        logger.setLevel(level)
