"""Seconds of a step as `lightning-ptm plan` has them, against the clock: the case `planner-25M` of the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUIET = 0.3
"""Share of the cores that other processes may use; if they use more, a step takes as long as they let it."""


@pytest.mark.slow
def test_seconds_are_those_of_the_run(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    if os.getloadavg()[0] > QUIET * cores:
        pytest.skip(f"{os.getloadavg()[0]:.1f} processes compute on {cores} cores: seconds would be theirs, too")
    command = [sys.executable, "-m", "benchmarks", "run", "planner-25M", "--repeats", "3", "--no-log"]
    subprocess.run([*command, "--disk-path", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    found = json.loads((ROOT / "benchmarks" / "results" / "planner-25M.json").read_text())["figures"]
    ratios = {figure["name"]: figure["ratio"] for figure in found}
    assert len(ratios) == 5
    assert max(ratios.values()) <= 1.2, ratios
