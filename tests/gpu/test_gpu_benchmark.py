"""The benchmark of the first day on a GPU, on the fake device: that its lines run, not what they measure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from fake_process import TESTS, need_fake_device, on_fake

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_all_lines_run_but_those_that_need_what_is_not_here(tmp_path: Path) -> None:
    """FSDP2 needs a real device's storages, DeepSpeed a toolkit; a line that fails says why and the others go on."""
    need_fake_device()
    paths = os.pathsep.join(map(str, (TESTS / "fake_cuda" / "everywhere", TESTS / "fake_cuda", TESTS)))
    options = ["--quick", "--lines", "placements,in_memory,largest", "--disk-path", str(tmp_path)]
    out = tmp_path / "out.json"
    command = ["benchmarks/gpu.py", *options, "--json", str(out)]
    done = on_fake(*command, limit_s=1000, PYTHONPATH=paths)
    assert "states on device, RAM, disk: the same losses, to the last bit" in done.stdout, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and ", fsdp2 " in failed[0], failed
    assert done.returncode == 1
    scores = json.loads(out.read_text())["sides"]
    assert {name.split(", ")[1] for name in scores if ", " in name} == {
        "plain",
        "masters in RAM",
        "all in RAM",
        "masters on disk",
        "lock-free",
    }
    losses = [score["turns"][-1]["loss"] for name, score in scores.items() if name != "largest"]
    assert max(losses) - min(losses) < 0.01
    assert all(turn["extra"]["device_peak_bytes"] > 0 for score in scores.values() for turn in score["turns"])
