"""Seeds of the fuzzer: those of `--seeds`, or some quick ones and more that are slow."""

from __future__ import annotations

import pytest
from kit.ranks.fixtures import one_compute_thread  # noqa: F401


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`seeds(quick, all)` on a test with an argument `seed`."""
    mark = metafunc.definition.get_closest_marker("seeds")
    if mark is None:
        return
    quick, count = mark.args
    asked = metafunc.config.getoption("--seeds")
    if asked is not None:
        quick = count = asked
    seeds = [pytest.param(seed, marks=() if seed < quick else pytest.mark.slow) for seed in range(count)]
    metafunc.parametrize("seed", seeds)
