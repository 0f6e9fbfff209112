"""The tests of a device's streams, on a fake CUDA device (tests/fake_cuda) where there is no real one; a race fails them."""

from __future__ import annotations

import pytest
from test_on_fake_device import ORDERS, built, on_fake  # noqa: F401  the fixture skips where there can be no fake device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ["-q", "-m", "gpu", "--show-capture=no", "-p", "fake_cuda_plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]


@pytest.mark.parametrize("order", ORDERS)
def test_streams_of_a_device_are_ordered_by_events_alone(order: str) -> None:
    done = on_fake("-m", "pytest", *FLAGS, "tests/gpu/test_device_streams.py", **ORDERS[order])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert ", 0 races" in done.stdout
    assert " skipped" not in done.stdout, done.stdout[-2000:]
