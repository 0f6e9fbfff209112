"""A tensor parallel degree for each unit, as the planner of Oases (section 4) chooses it, from our planner's virtual runs.

Searches the fastest chain of degrees under a memory limit (`fastest`), and prices it (`Degrees`): seconds of compute and of
sums are those of the planner's cost functions, bytes those of its activation memory, collectives those of its virtual runs
at one degree. Knows no rate of its own. A run has one `tensor_parallel_size`, so this answers what degrees by unit would
gain; `python -m benchmarks.paper --tables degrees,oases_planner` writes the answers.

I1: a chain of one degree takes the seconds of the planner's virtual run with it, if only collectives of parameters overlap
    with compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from lightning_ptm.commands.garbage import without_collections
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.question import Question
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting import hardware as machines
from lightning_ptm.forecasting.clock import Clock
from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.estimate import activation_bytes, offloaded_bytes
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.forecasting.rates import Activity, Hardware
from lightning_ptm.forecasting.send_order import Exchanged, SendOrder
from lightning_ptm.forecasting.step_seconds import Halves, exchanges, timed
from lightning_ptm.forecasting.timing import steady
from lightning_ptm.forecasting.update_extras import UpdateExtra, update_extras
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.autograd.recompute import recomputed_around, recomputed_units
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.terms import Link, Phase, Tier

ROOT = Path(__file__).resolve().parents[1]
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
_STEP_PARTS = 4_000
"""Seconds of a unit are rounded to this part of a step, so that sums over units that are alike have few different values."""
_ROUNDED = 0.02
"""Upper limit of all roundings together, as a share of a step."""


# --- The search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """A degree that a unit may have; all numbers are of one rank and step.

    Attributes:
        busy_s: seconds of compute, and of sums that do not pass beside it.
        link_s: seconds of collectives of its parameters and gradients, which pass beside compute of all units.
        kept_bytes: device memory from its forward to its backward, or for the whole run.
        peak_bytes: device memory while it computes, in addition to what all units keep.
    """

    degree: int
    busy_s: float
    link_s: float = 0.0
    kept_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """Degrees of all units, and the seconds of a step with them."""

    degrees: tuple[int, ...]
    seconds: float


Between = Callable[[int, Option, Option], float]
"""Seconds to hand activations from a unit to the next one; the first argument is the number of the latter, that of the
first unit where it also ends the chain."""


@dataclass(frozen=True, slots=True)
class _Label:
    """A chain up to some unit; `path` has its options, the last one first."""

    busy: int
    link: int
    kept: int
    peak: int
    path: tuple[Option, Any]


def fastest(
    units: Sequence[Sequence[Option]],
    between: Between,
    *,
    room_bytes: float = math.inf,
    floor_s: float = 0.0,
    most_s: float = math.inf,
    quantum_s: float = 1e-12,
) -> Chain | None:
    """Returns the chain with the least seconds whose memory fits; None: none fits.

    The seconds of a chain are the longer of compute, sums and handing on, and of its collectives. The first unit is the
    root, which computes the model's last layers, too: it also ends the chain.

    Args:
        units: by unit, its options.
        room_bytes: device memory.
        floor_s: seconds that a step takes whatever the degrees are.
        most_s: chains that take longer are not wanted.
        quantum_s: seconds of units are rounded to multiples of it, so that equal sums are equal numbers in any order.
    """

    def whole(seconds: float) -> int:
        return round(seconds / quantum_s)

    best: tuple[float, Any] = (most_s / quantum_s, None)
    for first in units[0]:
        given = [[first], *units[1:]]
        counts = _that_matter(given, room_bytes, floor_s)
        busy_to_come = _least_to_come(given, lambda option: whole(option.busy_s))
        link_to_come = _least_to_come(given, lambda option: whole(option.link_s))
        labels = [[_Label(whole(first.busy_s), whole(first.link_s), first.kept_bytes, first.peak_bytes, (first, None))]]
        for number, options in enumerate(given[1:], start=1):
            after = []
            for option in options:
                reached = []
                for there in labels:
                    handed = whole(between(number, there[0].path[0], option)) if there else 0
                    reached += [
                        _Label(
                            label.busy + whole(option.busy_s) + handed,
                            label.link + whole(option.link_s),
                            label.kept + option.kept_bytes,
                            max(label.peak, option.peak_bytes),
                            (option, label.path),
                        )
                        for label in there
                    ]
                fitting = [
                    each
                    for each in reached
                    if each.kept + each.peak <= room_bytes
                    and max(each.busy + busy_to_come[number], each.link + link_to_come[number]) <= best[0]
                ]
                after.append(_undominated(fitting, counts))
            labels = after
        for label in itertools.chain.from_iterable(labels):
            seconds = max(label.busy + whole(between(0, label.path[0], first)), label.link, whole(floor_s))
            if label.kept + label.peak <= room_bytes and (
                seconds < best[0] or (best[1] is None and seconds <= best[0])
            ):
                best = seconds, label.path
    if best[1] is None:
        return None
    return Chain(tuple(option.degree for option in reversed(list(_options_of(best[1])))), best[0] * quantum_s)


def _least_to_come(units: Sequence[Sequence[Option]], of: Callable[[Option], int]) -> list[int]:
    """By unit, the least that the units behind it take together."""
    least = [min(map(of, options)) for options in units]
    return [sum(least[number + 1 :]) for number in range(len(least))]


def _that_matter(units: Sequence[Sequence[Option]], room: float, floor_s: float) -> tuple[str, ...]:
    """The numbers of a label that decide between chains: collectives if they may take longer than compute, and memory if it
    may not suffice."""
    found = ["busy"]
    if sum(max(each.link_s for each in options) for options in units) > max(
        floor_s, sum(min(each.busy_s for each in options) for options in units)
    ):
        found.append("link")
    kept = sum(max(each.kept_bytes for each in options) for options in units)
    if kept + max(each.peak_bytes for options in units for each in options) > room:
        found += ["kept", "peak"]
    return tuple(found)


def _undominated(labels: Sequence[_Label], counts: Sequence[str]) -> list[_Label]:
    """The labels of which no other is at least as good in all numbers."""
    kept: list[tuple[tuple[int, ...], _Label]] = []
    for numbers, label in sorted(
        ((tuple(getattr(label, name) for name in counts), label) for label in labels), key=lambda pair: pair[0]
    ):
        # The latest is most often the one that dominates.
        if not any(all(map(int.__le__, other, numbers)) for other, _ in reversed(kept)):
            kept.append((numbers, label))
    return [label for _, label in kept]


def _options_of(path: Any) -> Iterator[Option]:
    while path is not None:
        option, path = path
        yield option


# --- Prices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Uniform:
    """A virtual run in which all units have one degree.

    Attributes:
        options: by unit, what this degree costs.
        entering_bytes: by unit, bytes of the activations that it takes.
        other_s: seconds of the busiest link that carries neither sums nor collectives.
    """

    degree: int
    prediction: Prediction
    blueprint: Blueprint
    plan: Plan
    trace: Trace
    exchanged: Exchanged
    rates: Hardware
    extras: Mapping[int, UpdateExtra]
    options: tuple[Option, ...]
    entering_bytes: tuple[int, ...]
    other_s: float


class Degrees:
    """Virtual runs of one model on some nodes, all units at one degree, and what a degree for each unit would gain.

    All runs have the same samples a step: a unit of degree d computes d times the samples of a rank.

    Args:
        document: a config.
        node_of: the node for groups of so many ranks, whose links may be faster for fewer ranks.
        samples: of a step over all ranks.
        degrees: to try; those that the model cannot have, or that leave a group without a sample, are skipped.
        strategy: settings of all runs.
        replicated_bytes: bytes of states for a parameter that each group of tensor ranks has whole, as without sharding
            over data ranks (collectives of states are not counted then); 0: pages, of which each rank has its share
            whatever the degree is.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        node_of: Callable[[int], Node],
        nodes: int,
        samples: int,
        degrees: Sequence[int],
        strategy: Mapping[str, Any],
        replicated_bytes: int = 0,
    ) -> None:
        # Configuration.
        self._document, self._node_of, self._nodes = document, node_of, nodes
        self._samples, self._strategy, self._replicated_bytes = samples, strategy, replicated_bytes
        self.refused: dict[int, str] = {}
        """By degree that was skipped, why."""
        found: dict[int, Uniform] = {}
        for degree in degrees:
            try:
                found[degree] = self._uniform(degree)
            except (ConfigError, CapacityError) as error:
                self.refused[degree] = str(error)
        self.uniform: Mapping[int, Uniform] = found
        """By degree, the run with it."""

    @property
    def room_bytes(self) -> int:
        """Device memory of a rank."""
        return self._node_of(1).device_memory

    def best(self, *, mixed: bool) -> Chain | None:
        """Returns the fastest chain that fits, of several degrees or of one."""
        alone = [self._fastest([degree]) for degree in self.uniform]
        best = min((each for each in alone if each is not None), key=lambda each: each.seconds, default=None)
        if not mixed:
            return best
        found = self._fastest(list(self.uniform), best.seconds if best else math.inf)
        return found if best is None or (found is not None and found.seconds < best.seconds) else best

    def priced(self, degrees: Sequence[int]) -> Chain | None:
        """Returns the chain with these degrees and its seconds, whether or not it fits; None: a degree was skipped."""
        if not set(degrees) <= set(self.uniform):
            return None
        units = [[self.uniform[degree].options[unit]] for unit, degree in enumerate(degrees)]
        return fastest(units, self._between, floor_s=self._floor_s)

    def replayed_s(self, degrees: Sequence[int]) -> float:
        """Returns the seconds of a virtual run with these degrees: fetches and collectives in the order of the plan for the
        least of them, which keeps the largest units on the device."""
        base = self.uniform[min(degrees)]
        flats, per_element, extras = list[FlatLayout](), list[int](), dict[int, UpdateExtra]()
        for unit, degree in enumerate(degrees):
            of_degree = self.uniform[degree]
            for flat in of_degree.blueprint.layout.flats_of(unit):
                per_element.append(of_degree.blueprint.placement.master_bytes_per_element[flat.index])
                if (extra := of_degree.extras.get(flat.index)) is not None:
                    extras[len(flats)] = extra
                flats.append(replace(flat, index=len(flats)))
        counts = [len(self.uniform[degree].blueprint.layout.flats_of(unit)) for unit, degree in enumerate(degrees)]
        layout = replace(
            base.blueprint.layout, flats=tuple(flats), first_flats=tuple(itertools.accumulate(counts, initial=0))
        )
        ticks = tuple(self.uniform[degrees[tick.unit]].trace.ticks[at] for at, tick in enumerate(base.trace.ticks))
        exchanged = {
            at: sent
            for at, tick in enumerate(base.trace.ticks)
            if (sent := self._with_handing_on(degrees, at, tick.unit, tick.phase))
        }
        of_largest = self.uniform[max(degrees)]
        blueprint = replace(
            base.blueprint,
            layout=layout,
            placement=replace(base.blueprint.placement, master_bytes_per_element=tuple(per_element)),
            holders=of_largest.blueprint.holders,
        )
        return _replayed_s(blueprint, base.plan, Trace(ticks), exchanged, of_largest.rates, extras)

    def _with_handing_on(self, degrees: Sequence[int], at: int, unit: int, phase: Phase) -> dict[Link, SendOrder]:
        """A tick's exchanges, with the activations that are handed on in its forward."""
        sent = dict(self.uniform[degrees[unit]].exchanged.get(at, {}))
        before = unit - 1 if unit else len(degrees) - 1
        if phase is Phase.FORWARD and (size := self.handed_bytes(unit, degrees[before], degrees[unit])):
            order = sent.get(Link.TENSOR_EXCHANGE, SendOrder())
            sent[Link.TENSOR_EXCHANGE] = replace(order + SendOrder(size, 1), hidden=order.hidden)
        return sent

    def _fastest(self, degrees: Sequence[int], most_s: float = math.inf) -> Chain | None:
        count = len(next(iter(self.uniform.values())).options) if self.uniform else 0
        units = [[self.uniform[degree].options[unit] for degree in degrees] for unit in range(count)]
        if not units:
            return None
        found = fastest(
            units,
            self._between,
            room_bytes=self.room_bytes,
            floor_s=self._floor_s,
            most_s=most_s * (1 + _ROUNDED),
            quantum_s=most_s / _STEP_PARTS if most_s < math.inf else 1e-12,
        )
        return found and self.priced(found.degrees)

    @property
    def _floor_s(self) -> float:
        return min((each.other_s for each in self.uniform.values()), default=0.0)

    def handed_bytes(self, unit: int, before: int, after: int) -> int:
        """Bytes that a rank sends where activations of groups of one degree become those of another: groups gather the
        batches of smaller ones, in the forward where the degree grows and in the backward where it shrinks."""
        larger, smaller = max(before, after), min(before, after)
        whole = self.uniform[larger].entering_bytes[unit]
        return whole * (larger - smaller) // larger

    def _between(self, unit: int, before: Option, after: Option) -> float:
        if before.degree == after.degree:
            return 0.0
        rates = self.uniform[max(before.degree, after.degree)].rates
        size = self.handed_bytes(unit, before.degree, after.degree)
        return size / rates.bytes_per_s(Link.TENSOR_EXCHANGE) + rates.collective_s.get(Link.TENSOR_EXCHANGE, 0.0)

    def _uniform(self, degree: int) -> Uniform:
        node, nodes = self._node_of(degree), self._nodes
        ranks = node.ranks_per_node * nodes
        samples, rest = divmod(self._samples * degree, ranks)
        if rest or not samples:
            raise ConfigError(f"{self._samples} samples are not the same number for each of {ranks // degree} groups")
        strategy = {**self._strategy, "tensor_parallel_size": degree}
        run = PlannedRun.of_config(self._document, Path("config.yaml"), strategy, node)
        found, blueprint = Question(run, "", node, nodes, samples).answer(None)
        assert found.plan is not None
        rates = node.rates(nodes, blueprint.holders)
        works = run.works[samples]
        recomputed = recomputed_units(len(blueprint.units), run.request.settings.recompute_every)
        again = recomputed_around(blueprint.units, recomputed)
        halves = Halves.HIDING if run.request.settings.tensor_parallel.in_halves else Halves.NONE
        dtype = str(run.request.compute).removeprefix("torch.")
        forward_s = [node.seconds(work, dtype, halves.calls) for work in works]
        trace = timed(blueprint.trace, forward_s, recomputed | again.keys(), halves.calls * (node.unit_s or 0.0))
        exchanged = exchanges(blueprint, works, trace, again, halves)
        busy_s = busy_by_unit(blueprint, ((tick, exchanged.get(at, {})) for at, tick in enumerate(trace.ticks)), rates)
        ends_with = {unit: work.ends_with for unit, work in enumerate(works) if work.ends_with is not None}
        plan = predicted_memory(blueprint, found.plan, blueprint.trace, again, ends_with).plan
        record: list[Activity] = []  # of a run as if activations fitted: together with other degrees they may
        extras = update_extras(blueprint, rates)
        step_s = _replayed_s(blueprint, plan, trace, exchanged, rates, extras, record)
        link_s, other_s = _link_s(record, len(works), step_s)
        kept, peak = _memory(works, recomputed, blueprint.trace)
        least = decide(run.request, node.machine(), ranks).pool_bytes[Tier.DEVICE]
        options = []
        for unit in range(len(works)):
            states = sum(flat.padded_numel for flat in blueprint.layout.flats_of(unit)) * self._replicated_bytes
            beside = peak[unit] + (0 if self._replicated_bytes else least)
            of_link_s = 0.0 if self._replicated_bytes else link_s[unit]
            options.append(Option(degree, busy_s[unit], of_link_s, kept[unit] + states, beside))
        entering = tuple(work.taken_bytes for work in works)
        # The root takes what the last unit hands it: as much as that unit takes.
        entering = (entering[-1], *entering[1:])
        return Uniform(
            degree, found, blueprint, plan, trace, exchanged, rates, extras, tuple(options), entering, other_s
        )


def busy_by_unit(
    blueprint: Blueprint, ticks: Iterable[tuple[Tick, Mapping[Link, SendOrder]]], rates: Hardware
) -> list[float]:
    """Returns by unit the seconds of ticks and their exchanges, on a clock for which all parameters are there."""
    clock = Clock(blueprint.layout, blueprint.placement, blueprint.budget, rates, holders=blueprint.holders)
    found = [0.0] * len(blueprint.units)
    for tick, exchanged in ticks:
        before_s = clock.so_far().seconds
        clock.compute(tick, exchanged)
        found[tick.unit] += clock.so_far().seconds - before_s
    return found


def _replayed_s(
    blueprint: Blueprint,
    plan: Plan,
    trace: Trace,
    exchanged: Exchanged,
    rates: Hardware,
    extras: Mapping[int, UpdateExtra],
    record: list[Activity] | None = None,
) -> float:
    """Seconds of a step of a virtual run; arguments as of `steady`."""
    timing = steady(
        blueprint.layout,
        blueprint.placement,
        plan,
        trace,
        blueprint.budget,
        rates,
        gradient_room_bytes=blueprint.gradient_room_bytes,
        record=record,
        exchanged=exchanged,
        holders=blueprint.holders,
        extras=extras,
    )
    return timing.seconds


def _link_s(record: Sequence[Activity], count: int, step_s: float) -> tuple[list[float], float]:
    """By unit, the seconds of its collectives in a step; and the busiest link without them and without sums."""
    found, others = [0.0] * count, dict.fromkeys(Link, 0.0)
    for activity in record:
        if activity.link is None or not 0 <= activity.start_s < step_s:
            continue
        if activity.link is Link.COLLECTIVE:
            found[activity.unit] += activity.seconds
        elif activity.link not in (Link.TENSOR_EXCHANGE, Link.EXCHANGE):
            others[activity.link] += activity.seconds
    return found, max(others.values())


def _memory(works: Sequence[UnitWork], recomputed: frozenset[int], trace: Trace) -> tuple[list[int], list[int]]:
    """By unit, the bytes that it keeps for its backward, and the most that it has in addition while it computes."""
    kept = [offloaded_bytes(works, recomputed, away=(unit,)) for unit in range(len(works))]
    peaks, held = [0] * len(works), set[int]()
    for tick, size in zip(trace.ticks, activation_bytes(works, recomputed, trace), strict=True):
        others = sum(kept[unit] for unit in held | {tick.unit})
        peaks[tick.unit] = max(peaks[tick.unit], size - others)
        if tick.phase is Phase.FORWARD:
            held.add(tick.unit)
        else:
            held.discard(tick.unit)
    return kept, peaks


# --- Questions and answers --------------------------------------------------------------------------------------------

_SHARES = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the units that virtual runs try with the second degree of a chain."""


@dataclass(frozen=True, slots=True)
class DegreeAsk:
    """What a degree for each unit would gain for a config on some servers, with so many samples of a rank."""

    config: str
    hardware: str
    nodes: int = 1
    samples: int = 1
    precision: str = "bf16-mixed"


@dataclass(frozen=True, slots=True)
class DegreeAnswer:
    """What was found; seconds are of a step.

    Attributes:
        uniform: the fastest degree of all units, and the chain's and the virtual run's seconds with it.
        mixed: the fastest chain's degrees and seconds, if all collectives passed beside compute.
        mixed_run: the mix that is the fastest in a virtual run, and its seconds there.
        refused: degrees that the model cannot have.
    """

    uniform: tuple[int, float, float]
    mixed: tuple[str, float]
    mixed_run: tuple[str, float]
    refused: tuple[int, ...]

    @property
    def gain(self) -> float:
        """Most that unequal degrees gain, in a step."""
        return self.uniform[1] / self.mixed[1] - 1

    @property
    def gain_in_run(self) -> float:
        """What unequal degrees gain in a virtual run."""
        return self.uniform[2] / self.mixed_run[1] - 1


def degree_answer(ask: DegreeAsk) -> DegreeAnswer | None:
    """Answers a question; None: no degree fits."""
    document = yaml.safe_load((ROOT / "configs" / f"{ask.config}.yaml").read_text())
    document["trainer"] |= {"gradient_clip_val": None, "precision": ask.precision}
    node = machines.look_up(ask.hardware)
    powers = [1 << power for power in range(node.ranks_per_node.bit_length())]
    with without_collections():
        degrees = Degrees(
            document, lambda _: node, ask.nodes, ask.samples * node.ranks_per_node * ask.nodes, powers, _NO_SETTINGS
        )
        alone, mixed = degrees.best(mixed=False), degrees.best(mixed=True)
        if alone is None or mixed is None:
            return None
        runs = {mix: degrees.replayed_s(mix) for mix in {mixed.degrees, *_spread(mixed.degrees, alone.degrees[0])}}
        best = min(runs, key=runs.__getitem__)
        return DegreeAnswer(
            (alone.degrees[0], alone.seconds, degrees.replayed_s(alone.degrees)),
            (in_words(mixed.degrees), mixed.seconds),
            (in_words(best), runs[best]),
            tuple(degrees.refused),
        )


def _spread(mixed: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yields mixes of the degree of the fastest uniform chain with each other degree of a chain: units with the latter are
    first, last, or spread evenly."""
    count = len(mixed) - 1
    for other in sorted(set(mixed) - {most}):
        for share in _SHARES:
            few = max(1, round(share * count))
            evenly = [(place + 1) * few // count != place * few // count for place in range(count)]
            for chosen in (
                evenly,
                [place < few for place in range(count)],
                [place >= count - few for place in range(count)],
            ):
                for root in (most, other):
                    yield (root, *(other if each else most for each in chosen))


def in_words(degrees: Sequence[int]) -> str:
    """Returns degrees of neighbouring units together, the root's first: `root 2, 4 x 8, 2 x 16`."""
    root, *others = degrees
    runs = [(degree, len(list(run))) for degree, run in itertools.groupby(others)]
    return f"root {root}, " + ", ".join(f"{degree} x {count}" for degree, count in runs)
