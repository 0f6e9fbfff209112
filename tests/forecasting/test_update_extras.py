"""Seconds of updates in addition to the pass over bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_ptm.forecasting.queues import Load
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.forecasting.update_extras import UpdateExtra, with_extra
from lightning_ptm.terms import Link

NODE = Hardware("one byte a second", *[1.0] * 7)
EXTRA = UpdateExtra(more_bytes=600, cpu_s=3.0, device_s=0.5)


@pytest.mark.parametrize(
    ("link", "shared_cores", "more_s"),
    [
        (Link.UPDATE_HOST, False, 1.5),
        (Link.UPDATE_DEVICE, True, 1.5),  # a CPU that computes
        (Link.UPDATE_DEVICE, False, 0.25),
    ],
)
def test_seconds_are_those_of_who_does_the_arithmetic(link: Link, shared_cores: bool, more_s: float) -> None:
    """Seconds of an update of half a flat: states are read and written as fp32 either way."""
    found = with_extra(Load(link, 1000, 7.0, more_s=0.25), EXTRA, replace(NODE, shared_cores=shared_cores), 0.5)
    assert found == Load(link, 1000 + 2 * 300, 7.0, more_s=0.25 + more_s)


def test_what_is_only_a_pass_takes_what_it_took() -> None:
    load = Load(Link.UPDATE_HOST, 1000)
    assert with_extra(load, None, NODE) is load
