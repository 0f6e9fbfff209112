"""benchmarks/oases.py: published numbers as in the paper, and schedules against sums of their parts."""

from __future__ import annotations

import pytest
import yaml

from benchmarks.oases import (
    CALIBRATED,
    CLUSTERS,
    EFFICIENCY,
    MODELS,
    STRATEGY,
    THROUGHPUT,
    Schedule,
    passes,
    published,
)
from benchmarks.unit_degrees import ROOT, Degrees, busy_by_unit
from lightning_ptm.forecasting import hardware
from lightning_ptm.terms import Link, Phase


def test_what_was_published() -> None:
    """Against the paper's text."""
    assert max(published("NVLink 3090", 2048)) == pytest.approx(1.62, abs=0.005)  # Table 3
    assert max(published("3090", 2048)) == pytest.approx(1.95, abs=0.01)  # "up to 1.95 over Megatron-LM"
    gains = [THROUGHPUT[CLUSTERS[0], width][4] / THROUGHPUT[CLUSTERS[0], width][3] for width in STRATEGY]
    assert gains == pytest.approx([1.16, 1.06, 1.02], abs=0.005)
    shares = [
        new / old
        for cluster in CLUSTERS
        for old, new in zip(EFFICIENCY[cluster, "Megatron-LM"], EFFICIENCY[cluster, "Oases"], strict=True)
    ]
    assert (min(shares), max(shares)) == pytest.approx((1.17, 2.18), abs=0.01)  # section 5.3
    for width, (_, firsts, _, seconds) in STRATEGY.items():
        assert firsts + seconds == MODELS[width].layers
    assert all(MODELS[width].degree == degree for degree, width in CALIBRATED.items())


def test_schedules_are_sums_of_their_parts() -> None:
    """Compute and sums of each pass, one after the other or beside each other."""
    document = yaml.safe_load((ROOT / "configs" / "gpt.yaml").read_text())
    document["trainer"] |= {"gradient_clip_val": None, "precision": "bf16-mixed"}
    node = hardware.look_up("l40s_x2")
    uniform = Degrees(document, lambda _: node, 1, 8, (2,), {"recompute": "all"}).uniform[2]
    seconds = {
        schedule: sum(busy_by_unit(uniform.blueprint, passes(uniform, schedule, 1.0), uniform.rates))
        for schedule in Schedule
    }
    rate = uniform.rates.bytes_per_s(Link.TENSOR_EXCHANGE)
    parts: dict[Schedule, float] = dict.fromkeys(Schedule, 0.0)
    sums_s = [uniform.exchanged.get(at, {}) for at in range(len(uniform.trace.ticks))]
    forward_s: dict[int, float] = {}
    for tick, sent in zip(uniform.trace.ticks, sums_s, strict=True):
        own_s = sent[Link.TENSOR_EXCHANGE].bytes / rate if sent else 0.0
        if tick.phase is Phase.FORWARD:
            forward_s.setdefault(tick.unit, own_s)
            again_s = 0.0
        else:
            again_s = forward_s[tick.unit] if tick.unit else 0.0
        third_s = tick.seconds / 3 if again_s else 0.0
        parts[Schedule.MEGATRON] += tick.seconds + own_s + again_s
        parts[Schedule.MERAK] += max(third_s, again_s) + max(tick.seconds - third_s, own_s)
        parts[Schedule.CROSS_PASS] += max(tick.seconds, own_s + again_s)
        parts[Schedule.FINE_GRAINED] += max(tick.seconds, own_s)
    assert seconds == pytest.approx(parts)
    assert sorted(seconds, key=seconds.__getitem__, reverse=True) == list(Schedule)
