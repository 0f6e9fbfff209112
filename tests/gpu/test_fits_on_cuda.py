"""Whole fits on a CUDA device: the cases of `fits_program.py`, bit for bit the same wherever model states live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fit_cases import CASES

TESTS = Path(__file__).parents[1]
PARTS = 4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("part", range(PARTS))
def test_fits_have_the_same_bits(part: int, tmp_path: Path) -> None:
    numbers = range(part, len(CASES), PARTS)
    paths = os.pathsep.join(map(str, (TESTS / "fake_cuda", TESTS / "gpu", TESTS, TESTS.parent)))
    command = [sys.executable, str(TESTS / "gpu" / "fits_program.py"), str(tmp_path), *map(str, numbers)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2", "FAKE_CUDA_REAL": "1"}
    done = subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=580, check=False
    )
    expected = "".join(f"case {number}: ok\n" for number in numbers)
    assert done.returncode == 0 and done.stdout == expected, done.stdout + done.stderr[-6000:]
