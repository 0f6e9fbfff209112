"""Puts the checkout's root into the path, where `benchmarks` is, after everything else."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
