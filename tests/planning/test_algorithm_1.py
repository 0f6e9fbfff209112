"""Steps of our plans beside those of the paper's Algorithm 1, literally by page (docs/design/algorithm_1.md)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import mean

import pytest

from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.layout import ModelLayout, build_layout
from lightning_ptm.planning.placement_data import Budget, Placement
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.trace import Trace, sequential_trace
from lightning_ptm.terms import Phase, Tier

from .algorithm_1 import Schedule, algorithm_1, in_pages, of_plan, step_seconds
from .models import PAGE, TABLE_4, even_layout, transformer_units
from .test_placement import pages, placed
from .test_schedule import ON_HOST

LARGE_PAGE = 64 << 20


@dataclass(frozen=True, slots=True)
class Case:
    layout: ModelLayout
    trace: Trace
    placement: Placement
    plan: Plan

    def literal(self) -> Schedule | None:
        limit = self.placement.gather_bytes // self.layout.page_size
        return algorithm_1(self.layout, self.placement, self.trace, limit)

    def ours(self) -> Schedule:
        return of_plan(self.layout, self.plan, self.trace)


def planned(layout: ModelLayout, budget: Budget, *, keep_gradients: bool = False) -> Case | None:
    """All homes in RAM; None if the budget is too small."""
    trace = sequential_trace(layout)
    try:
        placement = placed(layout, budget, wishes=ON_HOST, trace=trace, keep_gradients=keep_gradients)
        return Case(layout, trace, placement, schedule(layout, placement, trace, budget))
    except CapacityError:
        return None


def in_least_memory_and(layout: ModelLayout, more: int, *, keep_gradients: bool = False) -> Case:
    """With so many more pages than the least."""
    least = 4
    while planned(layout, pages(least, host=10_000), keep_gradients=keep_gradients) is None:
        least += 1
    found = planned(layout, pages(least + more, host=10_000), keep_gradients=keep_gradients)
    assert found is not None
    return found


def triggers(found: Schedule | None, *, gathers: bool) -> list[int]:
    assert found is not None
    return [each.trigger for each in found.transfers if each.gathers is gathers]


def test_with_room_each_page_is_moved_once_at_the_start() -> None:
    case = in_least_memory_and(even_layout([1, 4, 4, 4]), 100)
    assert triggers(case.literal(), gathers=False) == [0] * 13


def test_popped_pages_are_moved_as_soon_as_a_layer_has_freed_some() -> None:
    # Twelve pages hold the root, two blocks, and three pages of the third, whose last one comes when the first has computed.
    case = in_least_memory_and(even_layout([1, 4, 4, 4]), 2)
    assert triggers(case.literal(), gathers=False)[:13] == [0] * 12 + [2]


def test_all_gathers_are_advanced_to_where_memory_has_room() -> None:
    case = in_least_memory_and(even_layout([2, 8, 8], 2), 100)
    assert set(triggers(case.literal(), gathers=True)) == {0}


def test_the_clock_has_one_queue_of_copies_and_one_of_all_gathers() -> None:
    case = in_least_memory_and(even_layout([0, 4, 4], 2), 100)
    compute_s = [0.0 if tick.unit == 0 else 10.0 for tick in case.trace.ticks]
    # Two pages are moved, then gathered to four; the second block's are there before it computes.
    assert step_seconds(case.ours(), compute_s, move_s=1.0, gather_s=0.5) == 2 * 1.0 + 4 * 0.5 + 4 * 10.0
    assert step_seconds(in_pages(case.ours()), compute_s, move_s=1.0, gather_s=0.5) == 2 * 1.0 + 2 * 0.5 + 4 * 10.0


def random_ratios(count: int) -> dict[int, list[tuple[float, float]]]:
    """By number of ranks, our step divided by the literal one's: as plans are, and with all-gathers in pages."""
    random = Random(0)
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: [], 4: []}
    for _ in range(count):
        ranks = random.choice((1, 2, 4))
        sizes = [random.randint(0, 3) * ranks] + [random.randint(1, 8) * ranks for _ in range(random.randint(3, 10))]
        keep = random.random() < 0.5
        case = in_least_memory_and(even_layout(sizes, ranks), random.randint(0, sum(sizes)), keep_gradients=keep)
        compute_s = [
            (sizes[tick.unit] / ranks + 0.1) * random.uniform(0.3, 3) * (1 + (tick.phase is Phase.BACKWARD))
            for tick in case.trace.ticks
        ]
        gather_s = random.choice((0.16, 0.16, 0.5, 1.0))
        literal = case.literal()
        if literal is not None:
            base = step_seconds(literal, compute_s, 1.0, gather_s)
            ours = [
                step_seconds(each, compute_s, 1.0, gather_s) / base for each in (case.ours(), in_pages(case.ours()))
            ]
            found[ranks].append((ours[0], ours[1]))
    return found


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_steps_of_random_models(count: int) -> None:
    """What is gained by parts of units that Algorithm 1 keeps and fetches early is bounded by these numbers."""
    found = random_ratios(count)
    assert max(ours for of_ranks in found.values() for ours, _ in of_ranks) < 1.12
    for ranks, ratios in found.items():
        assert mean(ours for ours, _ in ratios) < 1.015
        assert ranks == 1 or mean(by_page for _, by_page in ratios) < 1.0


@pytest.mark.parametrize("name", ["GPT3-1.7B", "T5-1.4B", pytest.param("GPT3-13B", marks=pytest.mark.slow)])
def test_steps_of_the_papers_models_on_eight_ranks(name: str) -> None:
    model = next(each for each in TABLE_4 if each.name == name)
    layout = build_layout(transformer_units(model), page_size=LARGE_PAGE, world_size=8)
    parameters = [sum(flat.padded_numel for flat in layout.flats_of(unit)) for unit in range(len(layout.units))]
    compute_s = [
        2 * parameters[tick.unit] * 4096 * (1 + (tick.phase is Phase.BACKWARD)) / 150e12
        for tick in sequential_trace(layout).ticks
    ]

    def budget(count: int) -> Budget:
        return Budget({Tier.DEVICE: count * LARGE_PAGE, Tier.HOST: 1 << 50})

    least = next(count for count in range(4, 1000) if planned(layout, budget(count)) is not None)
    tight = planned(layout, budget(least))
    assert tight is not None and tight.literal() is None  # it keeps shards while their unit computes
    whole = sum(flat.padded_bytes for flat in layout.flats) // LARGE_PAGE
    for share in (15, 30, 60):
        case = planned(layout, budget(least + whole * share // 100))
        assert case is not None
        literal = case.literal()
        assert literal is not None
        seconds = [
            step_seconds(each, compute_s, LARGE_PAGE / 32e9, LARGE_PAGE / 200e9) for each in (case.ours(), literal)
        ]
        assert seconds[0] <= 1.002 * seconds[1]


def test_the_literal_schedule_fits() -> None:
    """Counted anew, tick by tick: pages of shards from their trigger to their last use, and of full units."""
    random = Random(1)
    for _ in range(20):
        ranks = random.choice((1, 2))
        layout = even_layout([random.randint(1, 6) * ranks for _ in range(5)], ranks)
        case = in_least_memory_and(layout, random.randint(0, 10))
        literal = case.literal()
        if literal is None:
            continue
        last = {name: tick for tick, needed in enumerate(literal.needed) for name in needed}
        for each in literal.transfers:
            for name in each.after:
                last[name] = max(last.get(name, 0), last[each.name])
        for tick in range(len(literal.needed)):
            held = sum(each.pages for each in literal.transfers if each.trigger <= tick <= last[each.name])
            assert held <= case.placement.gather_bytes // PAGE
