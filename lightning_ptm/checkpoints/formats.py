"""The checkpoint formats, and the choice of one: by the setting `state_dict_type` to write, by the path to read.

To add a format, implement `protocol.Format` (as sharded.py does) and add it here and to `Checkpoints.state_dict_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_ptm.checkpoints.full import FullFormat
from lightning_ptm.checkpoints.opened import Opened
from lightning_ptm.checkpoints.pretrained import PretrainedFormat
from lightning_ptm.checkpoints.protocol import Format, WeightFormat
from lightning_ptm.checkpoints.sharded import ShardedFormat
from lightning_ptm.errors import CheckpointError
from lightning_ptm.storage.index import DCP_METADATA
from lightning_ptm.storage.user_errors import is_file, is_folder

FULL = FullFormat()
SHARDED = ShardedFormat()
PRETRAINED = PretrainedFormat()

BY_STATE_DICT_TYPE: Mapping[str, Format] = {"full": FULL, "sharded": SHARDED}
"""Formats by their names in the setting `state_dict_type`."""


def of_checkpoint(path: Path, *, may_be_of_plugin: bool = False) -> Format:
    """Returns the format in which a checkpoint is read.

    Args:
        may_be_of_plugin: whether a CheckpointIO of the user may have written it, perhaps as a folder.
    """
    for each in BY_STATE_DICT_TYPE.values():
        if each.recognises(path):
            return each
    # A folder that no format has written. As a sharded checkpoint it is damaged, and the error says what it lacks.
    return FULL if may_be_of_plugin else SHARDED


def of_weights(path: Path) -> WeightFormat:
    """Returns the format in which `weights=` reads a path."""
    if SHARDED.recognises(path):
        return SHARDED
    if is_file(path / DCP_METADATA):
        from lightning_ptm.checkpoints.dcp import DcpFormat  # imports much of torch.distributed

        return DcpFormat()
    return PRETRAINED


def open_checkpoint(path: Path, *, weights_only: bool = True) -> Opened:
    """Opens a checkpoint of any format.

    Args:
        weights_only: load no object that could run code. Give False only for checkpoints that you trust.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, incomplete, or of another program.
    """
    if not is_folder(path) and not is_file(path):
        raise CheckpointError(f"there is no checkpoint {path}; give the path of a file or a folder that was saved")
    return of_checkpoint(path).open(path, weights_only=weights_only)
