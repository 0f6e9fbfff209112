"""Imported by the server that ranks are forked from, before the first: what each rank would else do for itself.

The strategy is imported by its module: the package imports what it names only when asked.
"""

from __future__ import annotations

import pytest  # noqa: F401
import torch.distributed  # noqa: F401

import kit.ranks.models
import kit.ranks.training  # noqa: F401
import lightning_ptm.callbacks
import lightning_ptm.trainer.strategy  # noqa: F401
from kit.quick_start import leave_out_of_collections, look_for_callbacks_once

look_for_callbacks_once()
leave_out_of_collections()
