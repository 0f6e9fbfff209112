"""The Trainer's subcommands: `lightning-ptm fit --config gpt.yaml`.

LightningCLI with six additions: a usage error is reported in one line, a bare name of a config file is also looked up in
`configs/`, a strategy or an accelerator may be given as a class path alone, `--data` may be left out, the config of a run
may overwrite that of an earlier run in the same folder, and `fit` ends by printing its losses and its checkpoint.
Other commands are in cli.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import ArgumentError, ArgumentParser, Namespace, capture_parser
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

import lightning_ptm.callbacks  # type: ignore[import-not-found,unused-ignore]  # in a checkout it is another folder
import lightning_ptm.commands.configured  # noqa: F401  our classes are known by their bare names
from lightning_ptm.commands.class_names import subclasses_of, unknown_class, unknown_class_among
from lightning_ptm.commands.config_names import resolve_config_names
from lightning_ptm.commands.mistakes import as_options, in_short, nearest
from lightning_ptm.commands.strategy_mistakes import wrong_strategy
from lightning_ptm.config import Settings
from lightning_ptm.data import TextBytes
from lightning_ptm.errors import AngelPTMError, CapacityError, CheckpointError, ConfigError, PageIOError, some
from lightning_ptm.trainer.internals import check_command_line, config_value, options_of
from lightning_ptm.trainer.strategy import AngelPTMStrategy

REFUSALS = (ConfigError, CapacityError, CheckpointError)
"""Errors about the user's input, for which a traceback is no help. So is a PageIOError without a page: the disk has no room
for the files."""

LIBRARIES = frozenset(
    {"jsonargparse", "lightning", "lightning_ptm", "lightning_utilities", "safetensors", "torch", "yaml"}
)
"""Modules, in addition to Python's own, that are not the user's code, so that their errors are about their input."""

_NAMED_CHECKPOINTS = ("best", "last", "hpc")
"""Values of `--ckpt_path` that Lightning resolves itself."""

check_command_line()


class _OwnError(BaseException):
    """Carries an exception of a model's or data module's constructor through jsonargparse, which would take an `Exception`
    for a value of the wrong type and, before 4.49, drop it."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Parser(LightningArgumentParser):
    """LightningCLI's parser, which reports a usage error in one line, without usage text, and does not need `--data`, since a
    LightningModule may have its own dataloaders."""

    subcommand = ""
    """The one that is parsed, which errors name; known to the parser of all subcommands."""

    def parses(self, subcommand: str) -> None:
        """Notes the subcommand that is parsed next."""
        self.subcommand = subcommand

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Adds the options of the Trainer, the model and the data."""
        needed = required and lightning_class is not LightningDataModule
        return super().add_lightning_class_args(lightning_class, nested_key, subclass_mode, needed)

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Adds an instantiator whose errors pass unchanged (`_OwnError`)."""

        @functools.wraps(instantiator)  # jsonargparse reads its signature
        def passing(*given: Any, **named: Any) -> Any:
            try:
                return instantiator(*given, **named)
            except Exception as error:
                raise _OwnError(error) from error

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # jsonargparse's, for a call by Lightning
            super().add_instantiator(passing, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the process with status 2 and the message on standard error."""
        if not self.exit_on_error or os.environ.get("JSONARGPARSE_DEBUG"):
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        name = parser.prog.replace(" [options]", "")
        if not name.endswith(self.subcommand):
            name = f"{name} {self.subcommand}"
        options = [option for action in options_of(parser) for option in action.option_strings]
        sys.stderr.write(f"{name}: {in_short(message, options)} (see {name} --help)\n")
        self.exit(2)


class PTMCommandLine(LightningCLI):
    """Any LightningModule (`--model`) and LightningDataModule (`--data`), with the subcommands of the Trainer."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parses `args`, or the process's arguments, after looking up bare names of config files."""
        if args is not None and not isinstance(args, list):
            super().parse_arguments(parser, args)
            return
        try:
            arguments = resolve_config_names(sys.argv[1:] if args is None else args)
        except ConfigError as error:
            parser.error(str(error))
        if isinstance(parser, Parser):
            parser.parses(next((each for each in arguments if each in self.subcommands()), ""))
        others = set(inspect.signature(AngelPTMStrategy).parameters) - {
            each.name for each in dataclasses.fields(Settings)
        }
        registered = StrategyRegistry.available_strategies()
        if problem := wrong_strategy(arguments, registered, sorted(others)) or unknown_class_among(arguments):
            parser.error(problem)
        self.config = parser.parse_args(arguments)

    def _parse_ckpt_path(self) -> None:
        """Skips the checkpoint's hyperparameters if the config has a model: the config takes precedence."""
        subcommand = self.config.get("subcommand")
        if subcommand and not self.config[subcommand].get("model"):
            super()._parse_ckpt_path()

    def instantiate_classes(self) -> None:
        """Builds the Trainer, the model and the data module. A setting of the strategy that cannot work is a usage error.

        Raises:
            ConfigError: a setting of the model or of the data module that cannot work.
        """
        self._take_for_a_class("strategy", Strategy, ["auto", *StrategyRegistry.available_strategies()])
        self._take_for_a_class(
            "accelerator", Accelerator, ["auto", "gpu", *AcceleratorRegistry.available_accelerators()]
        )
        strategy = config_value(self, self.config, "trainer.strategy")
        names = {field.name for field in dataclasses.fields(Settings)}
        if isinstance(strategy, Namespace) and strategy.get("class_path", "").endswith(AngelPTMStrategy.__name__):
            given = (strategy.get("init_args") or Namespace()).as_dict()
            try:
                Settings(**{name: value for name, value in given.items() if name in names})
            except ConfigError as error:
                # Otherwise jsonargparse would take it for a value of the wrong type, and list all types.
                self.parser.error(as_options(str(error)))
        for problem in (_no_accelerator(config_value(self, self.config, "trainer.accelerator")), self._no_checkpoint()):
            if problem:
                self.parser.error(problem)
        try:
            super().instantiate_classes()
        except _OwnError as passed:
            raise passed.error from passed.error.__cause__
        except (MisconfigurationException, TypeError, ValueError) as error:
            if not _is_lightnings(error):
                raise
            self.parser.error(" ".join(str(error).split()))  # Lightning's message about the Trainer's arguments

    def before_fit(self) -> None:
        """Checks that there is data to fit; called by LightningCLI."""
        self._check_data("train_dataloader")

    def before_validate(self) -> None:
        """Checks that there is data to validate; called by LightningCLI."""
        self._check_data("val_dataloader")

    def before_test(self) -> None:
        """Checks that there is data to test; called by LightningCLI."""
        self._check_data("test_dataloader")

    def before_predict(self) -> None:
        """Checks that there is data to predict; called by LightningCLI."""
        self._check_data("predict_dataloader")

    def _check_data(self, loader: str) -> None:
        if self.datamodule is None and not is_overridden(loader, self.model):
            self.parser.error(
                f"--data is missing, and {type(self.model).__name__} has no {loader}() of its own; give "
                f"--data=my_module.MyData"
            )

    def _take_for_a_class(self, part: str, kind: type[Strategy] | type[Accelerator], known: Sequence[str]) -> None:
        """Converts a Trainer argument (a registered name or an object) that is a class path alone into a class without
        settings. jsonargparse accepts any text as a name."""
        trainer = config_value(self, self.config, "trainer")
        given = trainer.get(part)
        if not isinstance(given, str) or given in known:
            return
        if "." not in given and given not in {each.__name__ for each in subclasses_of(kind)}:
            ours_first = sorted(known, key=lambda name: not name.startswith(AngelPTMStrategy.strategy_name))
            classes = [each.__name__ for each in subclasses_of(kind)]
            near = nearest(given, [*known, *classes]) or f"; there are {some(ours_first, 8)}"
            self.parser.error(f"there is no {part} {given!r}{near}")
        if problem := unknown_class(kind, given):
            self.parser.error(f"--trainer.{part}: {problem}")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(kind, part)
        try:
            trainer[part] = parser.parse_object({part: {"class_path": given}})[part]
        except ArgumentError as error:
            self.parser.error(str(error))

    def _no_checkpoint(self) -> str:
        """Returns the error of a `--ckpt_path` that names no checkpoint; empty if only the run can check it."""
        given = config_value(self, self.config, "ckpt_path")
        if not isinstance(given, str) or given in _NAMED_CHECKPOINTS or ":" in given or Path(given).exists():
            return ""
        there = sorted(path.name for path in Path(given).parent.glob("*.ckpt"))
        known = f"; there are {', '.join(there[-3:])}" if there else ""
        return f"--ckpt_path: there is no checkpoint {given}{known}"

    @rank_zero_only
    def after_fit(self) -> None:
        """Prints the last losses with all digits of float32, a baseline to compare them with, and the checkpoint's path."""
        self._print_losses()
        saves = self.trainer.checkpoint_callback
        if isinstance(saves, ModelCheckpoint) and saves.best_model_path:
            path = saves.best_model_path
            missing = not get_filesystem(path).exists(path)  # with on_failure="warn"
            print(f"no checkpoint: {path} could not be written" if missing else f"checkpoint: {path}")

    def _print_losses(self) -> None:
        metrics = self.trainer.callback_metrics
        text = self.datamodule if isinstance(self.datamodule, TextBytes) else None
        unit = f" {text.loss_unit}" if text is not None else ""
        if "train_loss" in metrics:
            print(f"training loss of the last batch: {float(metrics['train_loss']):.9g}{unit}")
        if "val_loss" not in metrics:
            print(f"no validation in {self.trainer.global_step} steps; see trainer.val_check_interval")
            return
        unigram = f"; unigram model of the same text: {text.unigram_loss:.4f}{unit}" if text is not None else ""
        print(f"validation loss: {float(metrics['val_loss']):.9g}{unit}{unigram}")


def _no_accelerator(given: object) -> str:
    """Returns why a run cannot use the accelerator given by name; empty if it can, or if Lightning's own error is good
    enough."""
    names = {"gpu": ("cuda", "mps")}.get(str(given), (str(given),))
    if not isinstance(given, str) or any(name not in AcceleratorRegistry for name in names):
        return ""
    if any(AcceleratorRegistry[name]["accelerator"].is_available() for name in names):
        return ""
    seen = (
        "is built without CUDA" if torch.version.cuda is None else "sees no GPU (is there a driver? `nvidia-smi` tells)"
    )
    why = f"torch {torch.__version__} {seen}" if "cuda" in names else "this machine has none"
    return f"--trainer.accelerator={given}: {why}; leave it out to take what there is, or give cpu"


def command_line(args: ArgsType = None, **settings: Any) -> PTMCommandLine:
    """Parses `args` (the process's arguments by default) and runs the subcommand.

    `settings` are LightningCLI's; `run=False` only parses and builds the Trainer, the model and the data.
    """
    settings.setdefault("parser_class", Parser)
    return PTMCommandLine(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=args,
        **settings,
    )


def trainer_parsers() -> dict[str, ArgumentParser]:
    """The parsers of LightningCLI's subcommands."""
    parser = capture_parser(lambda: command_line([]))
    (found,) = (dict(action.choices) for action in options_of(parser) if isinstance(action.choices, Mapping))
    return found


def _modules_of(error: BaseException) -> list[str]:
    """The top-level modules in the traceback of `error`, from where it was caught to where it was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]


def _is_lightnings(error: BaseException) -> bool:
    """Whether Lightning raised the error without user code in the traceback, so that it is about the arguments."""
    modules = _modules_of(error)
    return modules[-1] == "lightning" and not set(modules) - sys.stdlib_module_names - LIBRARIES


def _of_users_code(error: BaseException) -> bool:
    """Whether a refusal was caused by an error that passed through user code, so that its traceback is useful."""
    cause = error.__cause__
    while cause is not None:
        if not isinstance(cause, (AngelPTMError, OSError)):
            modules = set(_modules_of(cause)) - sys.stdlib_module_names - LIBRARIES
            if modules:
                return True
        cause = cause.__cause__
    return False


_OTHER_MODEL = "Error(s) in loading state_dict for "
"""Beginning of torch's error for a state dict of another module."""


def _of_another_model(error: RuntimeError) -> str:
    """Returns advice for a checkpoint of another model; empty for any other error."""
    if not str(error).startswith(_OTHER_MODEL) or set(_modules_of(error)) - sys.stdlib_module_names - LIBRARIES:
        return ""
    name, *differences = str(error).removeprefix(_OTHER_MODEL).split("\n\t")
    advice = some([each.strip().rstrip(".") for each in differences], 2)
    return (
        f"the checkpoint is of another model than this {name.strip().rstrip(':')} ({advice}); give the model the settings "
        f"that it was saved with (config.yaml in the folder of its run has them), or another --ckpt_path"
    )


def run_trainer(args: list[str] | None, descriptions: Mapping[str, str]) -> None:
    """Runs a subcommand of LightningCLI with `args`, or the process's. Our own errors end the process with status 1.

    `descriptions` says in a line what each subcommand does.

    REFUSALS are reported without a traceback, unless an error in the user's code caused them (an optimizer that fails when
    it is tried); other errors come with their traceback.
    """
    try:
        command_line(args, parser_kwargs=_helps(descriptions))
    except (*REFUSALS, PageIOError) as error:
        if _of_users_code(error) or (isinstance(error, PageIOError) and error.page is not None):
            raise
        _stop(args, str(error))
    except MisconfigurationException as error:
        if not _is_lightnings(error):
            raise
        _stop(args, " ".join(str(error).split()))
    except RuntimeError as error:
        if not (advice := _of_another_model(error)):
            raise
        _stop(args, advice)


def _helps(descriptions: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Arguments for LightningCLI's parsers. They would begin their help with a usage of hundreds of options."""
    return {
        name: {"usage": f"lightning-ptm {name} [options]", "description": description}
        for name, description in descriptions.items()
    }


def _stop(args: list[str] | None, advice: str) -> NoReturn:
    given = sys.argv[1:] if args is None else args
    sys.exit(f"lightning-ptm {' '.join(given[:1])}: {as_options(advice)}")
