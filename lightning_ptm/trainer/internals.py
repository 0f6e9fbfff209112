"""The private names of Lightning, torchmetrics and jsonargparse that this package uses; no other file uses any.

They are fetched as torch's are (torch_internals.py): a name that the installed version lacks raises a ConfigError that
states the tested versions. Attributes that exist on instances only are looked for in the code of the class's `__init__`.
Owns nothing.
"""

from __future__ import annotations

from argparse import Action
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ptm.torch_internals import checked, private, reader, writer

# -- what our subclasses override, or read from their bases as `self._name` --------------------------------------------

OF_STRATEGY = checked(
    ParallelStrategy,
    "_accelerator",
    "_checkpoint_io",
    "_configure_launcher",
    "_launcher",
    "_layer_sync",
    "_lightning_module",
    "_lightning_optimizers",
    "_optimizers",
    "_precision_plugin",
    "_reset_optimizers_and_schedulers",
)
OF_FABRIC_STRATEGY = checked(FabricStrategy, "_precision", "_backward_sync_control", "_configure_launcher", "_launcher")
"""Only Fabric reads the first of these, so reading it shows that Fabric, and not a Trainer, has the strategy."""
OF_FABRIC_RANKS = checked(FabricDDP, "_num_nodes")
"""Fabric assigns it where a strategy has `num_nodes`."""
OF_PRECISION = checked(Precision, "_after_closure")
OF_SUMMARY = checked(Summary, "_model")


def check_command_line() -> None:
    """Checks the method that our LightningCLI overrides. A function of its own since jsonargparse is slow to import."""
    checked("lightning.pytorch.cli", "LightningCLI._parse_ckpt_path")


def config_value(command_line: Any, config: Any, key: str) -> Any:
    """The value of `key` in a config of LightningCLI, for the chosen subcommand."""
    return private("lightning.pytorch.cli", "LightningCLI._get")(command_line, config, key)


def options_of(parser: Any) -> list[Action]:
    """All options of a jsonargparse parser."""
    found: list[Action] = private(parser, "_actions")
    return found


# -- functions and classes --------------------------------------------------------------------------------------------

WrappingCheckpointIO: type[Any] = private("lightning.pytorch.plugins.io.wrapper", "_WrappingCheckpointIO")
ScriptLauncher: type[Any] = private(
    "lightning.pytorch.strategies.launchers.subprocess_script", "_SubprocessScriptLauncher"
)
connect_ranks: Callable[..., None] = private("lightning.fabric.utilities.distributed", "_init_dist_connection")
reduced_over_ranks: Callable[..., Tensor] = private("lightning.fabric.utilities.distributed", "_sync_ddp_if_available")
seed_workers: Callable[[object, int], None] = private("lightning.fabric.utilities.data", "_auto_add_worker_init_fn")
note_device_and_dtype: Callable[..., None] = private(
    "lightning.fabric.utilities.device_dtype_mixin", "_update_properties"
)
"""Sets the `device` and `dtype` that modules report."""
move_optimizers: Callable[..., None] = private("lightning.fabric.utilities.optimizer", "_optimizers_to_device")

# -- the Trainer and what belongs to it -------------------------------------------------------------------------------

_CheckpointConnector = private("lightning.pytorch.trainer.connectors.checkpoint_connector", "_CheckpointConnector")
_DataConnector = private("lightning.pytorch.trainer.connectors.data_connector", "_DataConnector")
_DataHookSelector = private("lightning.pytorch.trainer.connectors.data_connector", "_DataHookSelector")
_SignalConnector = private("lightning.pytorch.trainer.connectors.signal_connector", "_SignalConnector")
_FitLoop = private("lightning.pytorch.loops.fit_loop", "_FitLoop")
_TrainingEpochLoop = private("lightning.pytorch.loops.training_epoch_loop", "_TrainingEpochLoop")

wrapped_optimizers: Callable[[Any], list[Any]] = reader(ParallelStrategy, "_lightning_optimizers")
"""Lightning's wrappers of the optimizers, in their order."""
checkpoints_of: Callable[[Trainer], Any] = reader(Trainer, "_checkpoint_connector")
"""The connector that restores the Trainer's state from checkpoints and dumps it."""
read_checkpoint: Callable[[Any], dict[str, Any]] = reader(_CheckpointConnector, "_loaded_checkpoint")
"""The checkpoint that `checkpoints_of(trainer)` has read and restores from."""
put_read_checkpoint: Callable[[Any, Mapping[str, Any]], None] = writer(_CheckpointConnector, "_loaded_checkpoint")
put_checkpoint_path: Callable[[Any, str | None], None] = writer(_CheckpointConnector, "_ckpt_path")
"""Sets the path that `checkpoints_of(trainer)` resumes from, which Lightning takes for a user's file and never removes."""
train_source_of: Callable[[Any], Any] = reader(_FitLoop, "_data_source")
"""The data source of a fit loop. Its `instance` is the object whose train_dataloader is called, or the loaders of fit."""


def train_source(trainer: Trainer) -> Any:
    """Returns what a fit takes its training data from: loaders, a data module or the module."""
    return train_source_of(trainer.fit_loop).instance


signals_of: Callable[[Trainer], Any] = reader(Trainer, "_signal_connector")
ON_SIGTERM, ON_REQUEUE = checked(_SignalConnector, "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
"""Names of the handlers for SIGTERM and for SLURM's signal, of `signals_of(trainer)`."""
requeue_of: Callable[[Any], Callable[..., None]] = reader(_SignalConnector, "_slurm_sigusr_handler_fn")
(BEFORE_BATCH,) = checked(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
"""Name of the epoch loop's method that asks before each batch whether rank 0 has received SIGTERM."""
steps_of_loop: Callable[[Any], int] = reader(_TrainingEpochLoop, "_batches_that_stepped")
"""The step number under which Lightning logs."""
skips_backward: Callable[[Any], bool] = reader(_FitLoop, "_skip_backward")

_data_of = reader(Trainer, "_data_connector")
_hooks_of_data = reader(_DataConnector, "_datahook_selector")
_data_module = reader(_DataHookSelector, "datamodule")


def data_module_of_call(trainer: Trainer) -> LightningDataModule | None:
    """The data module passed to this call of fit, test etc.; `trainer.datamodule` may be from an earlier call."""
    hooks = _hooks_of_data(_data_of(trainer))  # None before the first call
    found: LightningDataModule | None = getattr(trainer, "datamodule", None) if hooks is None else _data_module(hooks)
    return found


# -- modules, callbacks, loggers --------------------------------------------------------------------------------------

trainer_of: Callable[[LightningModule], Trainer | None] = reader(LightningModule, "_trainer")
"""`module.trainer`, but None where there is none, instead of an error."""
hook_of: Callable[[LightningModule], str | None] = reader(LightningModule, "_current_fx_name")
"""Name of the module's hook that runs now, for which it may log; None: none runs."""
compiled_as: Callable[[LightningModule], Mapping[str, Any] | None] = reader(LightningModule, "_compiler_ctx")
"""torch.compile's record of a module that was compiled as a whole; None if it was not."""
put_device_mesh: Callable[[LightningModule, Any], None] = writer(LightningModule, "_device_mesh")

(LINK,) = checked(ModelCheckpoint, "_link_checkpoint")
(SUMMARY,) = checked(ModelSummary, "_summary")
summary_of: Callable[[type[ModelSummary]], Callable[..., Any]] = reader(ModelSummary, "_summary")
depth_of_summary: Callable[[ModelSummary], int] = reader(ModelSummary, "_max_depth")
average_of: Callable[[WeightAveraging], nn.Module] = reader(WeightAveraging, "_average_model")
COPY_WEIGHTS = checked(WeightAveraging, "_swap_models", "_copy_average_to_current")
prunes_for_good: Callable[[ModelPruning], bool] = reader(ModelPruning, "_make_pruning_permanent")
layers_before_pruning: Callable[[ModelPruning], dict[int, Any] | None] = reader(ModelPruning, "_original_layers")
resamples: Callable[[ModelPruning], bool] = reader(ModelPruning, "_resample_parameters")
shows_only_hp_metric: Callable[[TensorBoardLogger], bool] = reader(TensorBoardLogger, "_default_hp_metric")

_batch_size_search = reader(BatchSizeFinder, "_early_exit")
_learning_rate_search = reader(LearningRateFinder, "_early_exit")


def is_search(callback: Callback) -> bool:
    """Whether a callback ends this fit early, as a Tuner's does: it only searches a batch size or a learning rate."""
    if isinstance(callback, BatchSizeFinder):
        return bool(_batch_size_search(callback))
    return isinstance(callback, LearningRateFinder) and bool(_learning_rate_search(callback))


(SYNC_METRIC,) = checked(Metric, "_sync_dist")
"""Name of the method that reduces a metric over ranks: (dist_sync_fn, process_group=...)."""
put_updates_of_metric: Callable[[Any, int], None] = writer(Metric, "_update_count")
last_of_metric: Callable[[Any], Any] = reader(Metric, "_forward_cache")
"""The value of a metric's last batch."""
put_last_of_metric: Callable[[Any, Any], None] = writer(Metric, "_forward_cache")
forget_value_of_metric: Callable[[Any, None], None] = writer(Metric, "_computed")
