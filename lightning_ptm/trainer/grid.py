"""GridStrategy: AngelPTMStrategy whose ranks are squares or cubes (grid modes of tensor parallelism, experimental).

To the engine, a grid is a tensor group whose ranks have slices of block-major parameters. New are the groups along the
grid's axes, over which the module's layers exchange, and the check that a checkpoint is of the same grid.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_ptm.config import Settings, listing_settings
from lightning_ptm.errors import CheckpointError, ConfigError, UsageError
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.parallel.grid import Grid, GridLayer
from lightning_ptm.parallel.grid.layers import slices_of
from lightning_ptm.planning.mesh import Axis, GridAxis, GridShape
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.torch_internals import is_compiled
from lightning_ptm.trainer.device_mesh import MeshGroups
from lightning_ptm.trainer.ranks import GridGroups, RankGroups
from lightning_ptm.trainer.strategy import AngelPTMStrategy

_KEY = "angel_ptm_grid"
"""Key of the grid in checkpoints."""
_OTHERS = (  # a grid does not combine with these settings
    "tensor_parallel_size",
    "tensor_parallel",
    "context_parallel_size",
    "expert_parallel_size",
    "pipeline_parallel_size",
    "slices",
    "weights",
)


@listing_settings
class GridStrategy(AngelPTMStrategy):
    """Trains modules of `lightning_ptm.parallel.grid`'s layers, with model states in pages as AngelPTMStrategy does.

    With more ranks than a grid has there are several grids, each with its own batches; their pages are sharded over the
    grids. For squares, this is 2.5D parallelism, whose depth is the number of grids. Other kinds of parallelism, `slices` and
    `weights` are refused.

    Args:
        mode: "2d" for squares, "3d" for cubes.
        side: number of ranks along each axis.
        timeout: how long a collective waits for the other ranks.
        settings: see `lightning_ptm.config.Settings`.

    Raises:
        ConfigError: a mode, side or setting is not possible.
    """

    strategy_name = "angel_ptm_grid"

    def __init__(
        self,
        mode: Literal["2d", "3d"] = "2d",
        side: int = 2,
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
        **settings: Any,
    ) -> None:
        if mode not in ("2d", "3d"):
            raise ConfigError(
                f"mode={mode!r} is no grid mode; use '2d' for squares of ranks (with several of them: 2.5D), '3d' for cubes"
            )
        if not isinstance(side, int) or side < 2:
            raise ConfigError(f"side={side!r} makes no grid; use 2 or more, or AngelPTMStrategy for one rank")
        # LightningCLI gives all settings, most of them as they are by default.
        default = Settings()
        other = next((name for name in _OTHERS if settings.get(name) not in (None, getattr(default, name))), None)
        if other is not None:
            raise ConfigError(
                f"GridStrategy got {other}, and a grid of ranks cannot be combined with it; leave it out, or use "
                f"AngelPTMStrategy"
            )
        self._shape = GridShape(side, cube=mode == "3d")
        super().__init__(timeout=timeout, **{**settings, "tensor_parallel_size": self._shape.size})
        # State.
        self._grid: Grid | None = None
        self._grid_groups: GridGroups | None = None
        self._made: MeshGroups | None = None
        """The groups of the runs for which `_grid` was made; others follow a failed run."""
        self._warned_of_draws = False

    @property
    def grid(self) -> Grid:
        """The rank's place in the grid, from which `configure_model` makes the layers.

        Raises:
            UsageError: no run has been set up.
        """
        if self._grid is None:
            raise UsageError(
                "trainer.strategy.grid exists from the set-up of a run on; make grid layers in configure_model"
            )
        return self._grid

    @override
    def setup_environment(self) -> None:
        ranks = self.num_nodes * self.num_processes
        if ranks % self._shape.size:
            raise ConfigError(
                f"a grid of side {self._shape.side} has {self._shape.size} ranks, which does not divide the number of ranks, "
                f"{ranks} (devices x num_nodes); use a multiple of {self._shape.size} ranks, or another side or mode"
            )
        super().setup_environment()

    @override
    def _with_more_groups(self, groups: RankGroups) -> RankGroups:
        if self._grid is None or groups.made is not self._made:
            mesh = self._mesh
            of_grid = {axis: self._group(self._shape.groups(mesh, axis), axis) for axis in self._shape.axes}
            self._grid = Grid(self._shape, mesh.coordinate(self.global_rank, Axis.TENSOR), of_grid)
            self._made, self._grid_groups = groups.made, GridGroups(self._shape, of_grid)
        return dataclasses.replace(groups, grid=self._grid_groups)

    @override
    def setup(self, trainer: Trainer) -> None:
        for name, each in self._module.named_modules():
            refuse_module(name, each)
            if isinstance(each, GridLayer):  # of this run or of an earlier one
                if each.grid.shape != self._shape:
                    raise ConfigError(
                        f"{name} was built for a grid of {each.grid.shape.size} ranks and this run has grids of "
                        f"{self._shape.size}; build another model, and give it the weights (whole and "
                        f"load_whole of lightning_ptm.parallel.grid)"
                    )
                each.join(self.grid)
        super().setup(trainer)

    def _group(self, partition: tuple[tuple[int, ...], ...], axis: GridAxis) -> RankGroup:
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition])
        return RankGroup(group, self._backend, axis)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        before = None if self._warned_of_draws else self._random_states()
        result = super().training_step(*args, **kwargs)
        if before is not None and warns_of_draws(before, self._random_states()):
            self._warned_of_draws = True
        return result

    def _random_states(self) -> list[Tensor]:
        of_device = self._backend.random_state()
        return [torch.get_rng_state(), *([] if of_device is None else [of_device])]

    @override
    def boxes(self) -> Mapping[str, TensorSlice]:
        return slices_of(self._module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, _KEY: self._in_words}, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        found = checkpoint.get(_KEY)  # weights that were converted have none
        if found not in (None, self._in_words):
            raise CheckpointError(
                f"{checkpoint_path} was saved with {found} and this run has {self._in_words}, so its blocks of parameters "
                f"are others; use the same mode and side, or convert its weights (whole and load_whole of "
                f"lightning_ptm.parallel.grid)"
            )
        return checkpoint

    @property
    def _in_words(self) -> str:
        return f"GridStrategy(mode={'3d' if self._shape.cube else '2d'!r}, side={self._shape.side})"

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_grid": None, "_grid_groups": None, "_made": None}


def warns_of_draws(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Warns if a training step has drawn random numbers; returns whether it has.

    Takes the random states before and after the step.

    Functions such as `F.dropout` cannot be refused before they are called, and a number that is drawn once for the whole
    batch is the same on all ranks, as it should be."""
    drawn = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    if drawn:
        rank_zero_warn(
            "the training step draws random numbers, and all ranks of a grid draw the same: dropout of activations would "
            "drop the same elements of their different blocks; draw numbers of the whole batch only, or use "
            "AngelPTMStrategy(tensor_parallel_size=...)"
        )
    return drawn


def refuse_module(name: str, module: nn.Module) -> None:
    """Raises a ConfigError if a module would compute something else on the blocks of a grid than on whole activations."""
    if isinstance(module, (nn.Dropout, nn.AlphaDropout)) and module.p:
        raise ConfigError(
            f"{name} drops activations with probability {module.p}, and all ranks of a grid draw the same random numbers for "
            f"their different blocks; leave dropout out, or use AngelPTMStrategy(tensor_parallel_size=...)"
        )
    if is_compiled(module):
        raise ConfigError(
            f"{name} is compiled by torch.compile, which does not trace exchanges of a grid of ranks; leave compile out, or "
            f"use AngelPTMStrategy(tensor_parallel_size=...)"
        )
