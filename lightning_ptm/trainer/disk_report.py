"""Messages about the bytes that a fit writes to disk: in its first line where the disk does not last, and at its end.

Owns the counters at the first batch. Reads the statistics of the run; waits once, at the end of training, for updates in
progress. The bytes are those of pages: checkpoints, logs and first values are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_ptm.config import format_bytes
from lightning_ptm.memory.endurance import MONTH_S, DiskLife, disk_life, duration, written_in_words
from lightning_ptm.runtime.engine.disk_writes import disk_writes
from lightning_ptm.torch_internals import tree_leaves

if TYPE_CHECKING:
    from lightning_ptm.runtime.engine.engine import Engine
    from lightning_ptm.runtime.engine.inspection import Statistics
    from lightning_ptm.trainer.builder import Builder


def token_count(batch: Any) -> int | None:
    """Returns the number of a batch's input tokens: the elements of its first tensor, if that is 2-D and of integers."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    tokens = first is not None and first.ndim == 2 and not first.is_floating_point()
    return first.numel() if first is not None and tokens else None


def in_first_line(engine: Engine, builder: Builder) -> str:
    """Returns a phrase with the bytes that a step writes, if steps of one second would wear a disk out within a month."""
    if not builder.fits or not engine.disk_paths:
        return ""
    lock_free = engine.blueprint.lock_free is not None
    written = disk_writes(
        (flat for flats in engine.flats for flat in flats),
        len(engine.disk_paths),
        engine.allocator.page_size,
        late_versions=lock_free,
        once=engine.blueprint.reduced_at_step,
    ).of_step(builder.trainer.accumulate_grad_batches)
    life = _life(engine, builder, written)
    if life is None or life.steps >= MONTH_S:
        return ""
    most = "at most " if lock_free else ""
    size = format_bytes(sum(written))
    return f"; a step writes {most}{size} to disk, and the rated {life.rating} last {life.steps:,} steps"


def _life(engine: Engine, builder: Builder, written: tuple[int, ...]) -> DiskLife | None:
    """The life of this machine's disks, if each of its ranks writes so many bytes to each folder in a step."""
    ranks, given = builder.place.ranks_here, builder.settings.rated_disk_bytes
    return disk_life(engine.disk_paths, [ranks * size for size in written], given) if written else None


class DiskReport:
    """Counters of a fit, and its report.

    Args:
        builder: factory of the run's engines.
        statistics: returns those of the run, over all its engines.
    """

    def __init__(self, builder: Builder, statistics: Callable[[], Statistics]) -> None:
        # Configuration.
        self._builder = builder
        self._statistics = statistics
        # State.
        self._began_s = 0.0
        self._first: tuple[int, ...] | None = None
        """Bytes written to each folder before the first batch; None: no batch has come."""
        self._first_step = 0
        self._tokens: int | None = 0
        """Tokens of this rank's batches; None: a batch was not of tokens."""
        self.counts = True
        """Whether further batches count: not where nothing is written to disk, or once one was not of tokens."""

    def batch_starts(self, engine: Engine, batch: Any) -> None:
        """Counts a batch of this rank."""
        if not engine.disk_paths:
            self.counts = False
            return
        if self._first is None:
            self._first, self._first_step = self._statistics().disk_written_bytes, self._builder.trainer.global_step
            self._began_s = monotonic()
        count = token_count(batch)
        self._tokens = None if count is None or self._tokens is None else self._tokens + count
        self.counts = self._tokens is not None

    def training_ends(self, engine: Engine) -> None:
        """Reports the bytes of all steps, if any were written. Waits for updates in progress, whose writes count."""
        builder = self._builder
        steps = builder.trainer.global_step - self._first_step
        if self._first is None or steps <= 0:
            return
        step_s = (monotonic() - self._began_s) / steps
        engine.updates.finish_all()
        now = self._statistics().disk_written_bytes
        written = tuple(after - before for after, before in itertools.zip_longest(now, self._first, fillvalue=0))
        if not any(written):
            return
        place = builder.place
        whose = f" (rank {place.rank} of {place.world_size})" if place.world_size > 1 else ""
        together = len(engine.blueprint.holders.mesh.replicas[0])  # ranks that compute the same batch
        tokens = self._tokens / steps / together if self._tokens else None
        life = _life(engine, builder, tuple(-(-each // steps) for each in written))
        lasts = ""
        if life is not None:
            lasts = f"; the disk's rated {life.rating} last {duration(life.seconds(step_s))} at this speed"
        rank_zero_info(
            f"{builder.name} has written {format_bytes(sum(written))} to disk in {steps:,} steps{whose}, checkpoints not "
            f"counted: {written_in_words(sum(written) / steps, tokens)}{lasts}"
        )
