"""Public names for sharded checkpoints (`state_dict_type="sharded"`): reading them outside of runs."""

from typing import TYPE_CHECKING, Any

from lightning_ptm.checkpoints.file_io import ShardedCheckpointIO, to_file
from lightning_ptm.checkpoints.sharded import load

if TYPE_CHECKING:
    from lightning_ptm.checkpoints.dcp import DCPReader

__all__ = ["DCPReader", "ShardedCheckpointIO", "load", "to_file"]


def __getattr__(name: str) -> Any:
    if name != "DCPReader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_ptm.checkpoints.dcp import DCPReader  # takes some MiB of RAM

    return DCPReader
