"""The update: the user's optimizer, run page by page where the master states live."""

from lightning_ptm.update.gradient import (
    GradientReader,
    GradientSource,
    ParameterGradients,
    ShardGradient,
    TensorGradient,
    Transform,
)
from lightning_ptm.update.job import JobHandle, Pending, UpdateJob, check_every_gradient
from lightning_ptm.update.norms import (
    all_finite,
    clip_coefficient,
    norm_of_power,
    parameter_norms,
    shard_power,
    total_norm,
)
from lightning_ptm.update.probe import probe
from lightning_ptm.update.scale import LossScale
from lightning_ptm.update.shadow import HyperParameters, RunViews, Shadow, snapshot
from lightning_ptm.update.states import FlatStates, Run, Segment, shard_segments
from lightning_ptm.update.stats import UpdateStats
from lightning_ptm.update.traits import GroupTraits, Initial, OptimizerTraits, ScalarState, SlotTraits, same_value
from lightning_ptm.update.updater import Updater

__all__ = [
    "FlatStates",
    "GradientReader",
    "GradientSource",
    "GroupTraits",
    "HyperParameters",
    "Initial",
    "JobHandle",
    "LossScale",
    "OptimizerTraits",
    "ParameterGradients",
    "Pending",
    "Run",
    "RunViews",
    "ScalarState",
    "Segment",
    "Shadow",
    "ShardGradient",
    "SlotTraits",
    "TensorGradient",
    "Transform",
    "UpdateJob",
    "UpdateStats",
    "Updater",
    "all_finite",
    "check_every_gradient",
    "clip_coefficient",
    "norm_of_power",
    "parameter_norms",
    "probe",
    "same_value",
    "shard_power",
    "shard_segments",
    "snapshot",
    "total_norm",
]
