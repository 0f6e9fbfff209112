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


ON_THE_SECOND = """
import sys
import tempfile
import fake_device
sys.path.insert(0, "tests/gpu")
from test_cuda import SMALL, train

with tempfile.TemporaryDirectory() as folder:
    on_disk = {"offload_parameters": "disk", "offload_optimizer": "disk", "disk_path": folder, **SMALL}
    lock_free = {**on_disk, "offload_parameters": "host", "lock_free": True}
    for settings in ({}, on_disk, lock_free, {"offload_activations": "host"}):
        train(devices=[1], **settings)
print("devices used:", fake_device.lib.fc_devices_used())
"""


def test_a_rank_on_the_second_device_makes_no_context_on_the_first() -> None:
    """Nor do its threads: of files, of updates, of buffers. Each begins with the first device as its current one."""
    done = on_fake("-c", ON_THE_SECOND, FAKE_CUDA_DEVICES="2", FAKE_CUDA_NO_RACE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"devices used: {1 << 1}\n" in done.stdout, done.stdout[-2000:]
