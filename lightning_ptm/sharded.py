"""Public names for sharded checkpoints (`state_dict_type="sharded"`): reading them outside of runs."""

from lightning_ptm.checkpoints.dcp import DCPReader
from lightning_ptm.checkpoints.file_io import ShardedCheckpointIO, to_file
from lightning_ptm.checkpoints.sharded import load

__all__ = ["DCPReader", "ShardedCheckpointIO", "load", "to_file"]
