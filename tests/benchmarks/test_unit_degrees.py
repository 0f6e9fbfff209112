"""benchmarks/unit_degrees.py: the search against all chains, and its prices against virtual runs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.unit_degrees import Degrees, Option, fastest, in_words
from lightning_ptm.forecasting import hardware

ROOT = Path(__file__).parents[2]


def drawn(seed: int) -> tuple[list[list[Option]], dict[tuple[int, int, int], float], dict[str, float]]:
    """Units with options, seconds between them, and limits."""
    draw = random.Random(seed)
    degrees = draw.sample((1, 2, 4, 8), draw.randint(2, 3))
    units = [
        [
            Option(
                degree,
                draw.randint(1, 20),
                draw.randint(0, 30) * draw.choice((0, 1)),
                draw.randint(0, 9),
                draw.randint(0, 9),
            )
            for degree in degrees
        ]
        for _ in range(draw.randint(2, 6))
    ]
    pairs = itertools.permutations(degrees, 2)
    between = {(unit, *pair): float(draw.randint(0, 6)) for pair in pairs for unit in range(len(units))}
    return units, between, {"room_bytes": draw.choice((20, 30, 1000)), "floor_s": draw.choice((0, 50))}


def brute_force(
    units: list[list[Option]], between: dict[tuple[int, int, int], float], room_bytes: float, floor_s: float
) -> dict[tuple[int, ...], float]:
    """Returns the seconds of all chains that fit."""
    found = {}
    for chain in itertools.product(*units):
        handed = sum(between.get((unit, chain[unit - 1].degree, each.degree), 0.0) for unit, each in enumerate(chain))
        if sum(each.kept_bytes for each in chain) + max(each.peak_bytes for each in chain) <= room_bytes:
            busy, link = (sum(getattr(each, name) for each in chain) for name in ("busy_s", "link_s"))
            found[tuple(each.degree for each in chain)] = max(busy + handed, link, floor_s)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_fastest_of_all_chains(seed: int) -> None:
    units, between, limits = drawn(seed)

    def handed(unit: int, before: Option, after: Option) -> float:
        return between.get((unit, before.degree, after.degree), 0.0)

    every = brute_force(units, between, **limits)
    chain = fastest(units, handed, **limits)
    if not every:
        assert chain is None
        return
    assert chain is not None
    assert chain.seconds == pytest.approx(min(every.values())) == pytest.approx(every[chain.degrees])


def test_drawn_cases_have_what_decides() -> None:
    """Among the cases of the test above are some in which nothing fits, and some whose best chain has several degrees."""
    best = []
    for seed in range(40):
        units, between, limits = drawn(seed)
        every = brute_force(units, between, **limits)
        best.append(len(set(min(every, key=every.__getitem__))) if every else 0)
    assert best.count(0) >= 2 and sum(count > 1 for count in best) >= 10


def test_dominated_chains_are_dropped() -> None:
    """Without that, 60 equal units would have 2 ** 60 chains. Memory suffices for 21 units with the faster degree."""
    units = [[Option(1, 1.0, kept_bytes=2), Option(2, 1.5, kept_bytes=1)]] * 61
    chain = fastest(units, lambda unit, before, after: 0.1 * (before.degree != after.degree), room_bytes=61 + 21)
    assert chain is not None
    assert chain.degrees.count(1) == 21 and chain.seconds == pytest.approx(21 + 40 * 1.5 + 0.2)


def small(**strategy: Any) -> Degrees:
    document = yaml.safe_load((ROOT / "configs" / "gpt.yaml").read_text())
    document["trainer"] |= {"gradient_clip_val": None, "precision": "bf16-mixed"}
    document["model"]["init_args"]["heads"] = 4
    node = hardware.look_up("l40s_x4")
    return Degrees(document, lambda _: node, 1, 32, (1, 2, 4, 3), strategy)


def test_prices_are_those_of_virtual_runs() -> None:
    degrees = small()
    assert list(degrees.uniform) == [1, 2, 4] and list(degrees.refused) == [3]
    count = len(degrees.uniform[1].options)
    for degree, run in degrees.uniform.items():
        found, chain = run.prediction, degrees.priced([degree] * count)
        assert found.timing is not None and chain is not None
        assert degrees.replayed_s([degree] * count) == pytest.approx(found.seconds)
        stalls = {stall.cause.value: stall.seconds for stall in found.timing.stalls}
        busy_s = sum(option.busy_s for option in run.options)
        assert busy_s == pytest.approx(found.timing.compute_s + stalls.get("exchange", 0.0))
        links = {use.link.value: use.busy_s for use in found.timing.links}
        assert sum(option.link_s for option in run.options) == pytest.approx(links["collective"])
        assert chain.seconds == pytest.approx(max(busy_s, links["collective"]))
    alone, mixed = degrees.best(mixed=False), degrees.best(mixed=True)
    assert alone is not None and mixed is not None and mixed.seconds <= alone.seconds


def test_a_change_of_degree_is_paid_for() -> None:
    """A virtual run of unequal degrees gathers the activations where they differ."""
    degrees = small()
    count = len(degrees.uniform[1].options)
    change = [1, *[1] * (count - 2), 4]
    priced = degrees.priced(change)
    assert priced is not None
    own_s = sum(degrees.uniform[degree].options[unit].busy_s for unit, degree in enumerate(change))
    # Into the last unit and back to the root: three quarters of what a group of 4 computes.
    sent = 2 * 3 * degrees.uniform[4].entering_bytes[-1] // 4
    assert priced.seconds == pytest.approx(own_s + sent / 20e9)


def test_degrees_in_words() -> None:
    assert in_words([2, 4, 4, 2, 4]) == "root 2, 4 x 2, 2 x 1, 4 x 1"
