"""Time and memory of planning: layout, placement, schedule and simulation, up to GPT3-175B on 768 ranks.

Needs no GPU, no torch and no memory for the model: `python benchmarks/planning.py`. The limits are those that the
project promises for GPT3-175B on 768 ranks: under 20 s and 4 GB. The last rows keep the model and make pages smaller,
or keep the page and make the model deeper, to show what the cost grows with. Times are of one run, memory is the peak
of Python's allocations in a second one.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.placement import place
from lightning_ptm.planning.placement_data import Budget
from lightning_ptm.planning.plan_diff import digest, plan_lines
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.simulate import simulate
from lightning_ptm.planning.trace import sequential_trace
from lightning_ptm.terms import Tier

GIB = 1024**3
LIMIT_S = 20.0
LIMIT_BYTES = 4 * 10**9

# One of eight ranks of a server of the paper's Table 3; of a device's 40 GiB, four are left to activations.
BUDGET = Budget({Tier.DEVICE: 36 * GIB, Tier.HOST: 120 * GIB, Tier.DISK: 11 * 10**12 // 8})


@dataclass(frozen=True, slots=True)
class Case:
    """A GPT of `layers` blocks, each a unit, on `ranks` ranks."""

    name: str
    layers: int
    width: int
    ranks: int
    page_size: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cost:
    """What planning one case took."""

    pages: int
    layout_s: float
    place_s: float
    schedule_s: float
    simulate_s: float
    peak_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of all four parts."""
        return self.layout_s + self.place_s + self.schedule_s + self.simulate_s


CASES = (
    Case("GPT3-1.7B", 24, 2304, 8),
    Case("GPT3-55B", 68, 8192, 8),
    Case("GPT3-175B, 70 blocks", 70, 14336, 768),
    Case("GPT3-175B, 96 blocks", 96, 12288, 768),
    Case("GPT3-175B, 1 MiB pages", 96, 12288, 768, 1024**2),
    Case("GPT3-175B, 64 KiB pages", 96, 12288, 768, 64 * 1024),
    Case("GPT, 192 blocks, 64 KiB pages", 192, 12288, 768, 64 * 1024),
    Case("GPT, 384 blocks, 64 KiB pages", 384, 12288, 768, 64 * 1024),
)


def gpt_units(case: Case) -> list[UnitSpec]:
    """The units of a GPT: embeddings and last norm in the root, then the blocks."""

    def weight(name: str, *shape: int) -> ParameterSpec:
        return ParameterSpec(name, shape, "bfloat16", 2, True, int(len(shape) == 1))

    width = case.width
    root = (weight("embedding", 50257, width), weight("positions", 2048, width), weight("norm", width))
    units = [UnitSpec("root", root)]
    for index in range(case.layers):
        shapes = {
            "attention.qkv": (3 * width, width),
            "attention.out": (width, width),
            "mlp.up": (4 * width, width),
            "mlp.down": (width, 4 * width),
        }
        matrices = [weight(f"layers.{index}.{name}.weight", *shape) for name, shape in shapes.items()]
        vectors = [weight(f"layers.{index}.{name}.bias", shape[0]) for name, shape in shapes.items()]
        norms = [weight(f"layers.{index}.norm{number}.{part}", width) for number in (1, 2) for part in "wb"]
        units.append(UnitSpec(f"layers.{index}", (*matrices, *vectors, *norms)))
    return units


def measure(case: Case) -> Cost:
    """Plan once for time, once more under tracemalloc for memory."""
    timed = _plan(case)
    tracemalloc.start()
    _plan(case)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return replace(timed, peak_bytes=peak_bytes)


def _plan(case: Case) -> Cost:
    clock = _Clock()
    layout = build_layout(gpt_units(case), page_size=case.page_size, world_size=case.ranks)
    # A rank's pages of one unit, as the runtime asks for them.
    pages = sum(len(flat.pieces(case.ranks - 1)) for flat in layout.flats)
    layout_s = clock.lap()
    trace = sequential_trace(layout)
    placement = place(
        layout,
        [12] * len(layout.flats),
        trace,
        BUDGET,
        unified=False,
        keep_gradients=False,
        staging_bytes=64 * 1024**2,
        update_on_device=True,
    )
    place_s = clock.lap()
    plan = schedule(layout, placement, trace, BUDGET)
    digest(list(plan_lines(plan, layout)))
    schedule_s = clock.lap()
    simulate(layout, placement, plan, trace, BUDGET)
    return Cost(pages, layout_s, place_s, schedule_s, clock.lap(), 0)


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        return lap


def main(show: Callable[[str], None] = print) -> bool:
    """Print the table; whether GPT3-175B on 768 ranks keeps the limits."""
    header = f"{'model':<30} {'ranks':>5} {'units':>5} {'pages/rank':>10} {'layout':>8} {'place':>8} {'schedule':>8}"
    show(f"{header} {'simulate':>8} {'total':>8} {'memory':>9} {'us/page':>8}")
    kept = True
    for case in CASES:
        cost = measure(case)
        parts = (cost.layout_s, cost.place_s, cost.schedule_s, cost.simulate_s, cost.total_s)
        times = " ".join(f"{seconds:>6.3f} s" for seconds in parts)
        row = f"{case.name:<30} {case.ranks:>5} {case.layers + 1:>5} {cost.pages:>10} {times}"
        show(f"{row} {cost.peak_bytes / 1e6:>6.1f} MB {cost.total_s / cost.pages * 1e6:>8.1f}")
        if case.name.startswith("GPT3-175B"):
            kept &= cost.total_s < LIMIT_S and cost.peak_bytes < LIMIT_BYTES
    show(f"GPT3-175B on 768 ranks under {LIMIT_S:.0f} s and {LIMIT_BYTES / 1e9:.0f} GB: {'yes' if kept else 'NO'}")
    return kept


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    raise SystemExit(0 if main() else 1)
