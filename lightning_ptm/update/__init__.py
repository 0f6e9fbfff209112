"""The update: the user's optimizer, run page by page where the master states live."""

from lightning_ptm.update.gradient import (
    NO_TRANSFORM,
    GradientReader,
    GradientSource,
    ParameterGradients,
    ShardGradient,
    TensorGradient,
    Transform,
)
from lightning_ptm.update.job import JobHandle, UpdateJob, check_every_gradient
from lightning_ptm.update.norms import (
    clip_coefficient,
    greatest,
    norm_of_power,
    parameter_norms,
    shard_power,
    total_norm,
)
from lightning_ptm.update.probe import probe
from lightning_ptm.update.scale import LossScale
from lightning_ptm.update.shadow import HyperParameters, RunViews, Shadow, snapshot
from lightning_ptm.update.state_layout import StateLayout, lay_out_states, layout_groups, states_of_all_ranks
from lightning_ptm.update.states import FlatStates, Segment, shard_segments
from lightning_ptm.update.traits import Initial, OptimizerTraits, same_value
from lightning_ptm.update.updater import Updater

__all__ = [
    "NO_TRANSFORM",
    "FlatStates",
    "GradientReader",
    "GradientSource",
    "HyperParameters",
    "Initial",
    "JobHandle",
    "LossScale",
    "OptimizerTraits",
    "ParameterGradients",
    "RunViews",
    "Segment",
    "Shadow",
    "ShardGradient",
    "StateLayout",
    "TensorGradient",
    "Transform",
    "UpdateJob",
    "Updater",
    "greatest",
    "check_every_gradient",
    "clip_coefficient",
    "lay_out_states",
    "layout_groups",
    "norm_of_power",
    "parameter_norms",
    "probe",
    "same_value",
    "shard_power",
    "shard_segments",
    "snapshot",
    "states_of_all_ranks",
    "total_norm",
]
