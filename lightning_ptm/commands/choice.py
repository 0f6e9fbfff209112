"""Choice of parallelism: how ranks are divided, and what is recomputed and offloaded, for the fastest step that fits.

Owns the table of what is chosen (`DIMENSIONS`), the lower bounds of the search, and its result. Runs are predicted by
question.py. What the user has set stays.

I1: no bound exceeds the seconds that question.py predicts, so nothing that is left out is faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ptm.commands.choice_report import (
    MICRO_BATCHES,
    OVERLAP,
    SCHEDULE,
    SLICES,
    Choice,
    Ranked,
    differences,
    next_wins,
    why,
    words,
)
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.proposals import ACCUMULATE
from lightning_ptm.commands.question import Question
from lightning_ptm.commands.room import Stage
from lightning_ptm.config import Settings
from lightning_ptm.errors import AngelPTMError, CapacityError, ConfigError
from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.estimate import check_stages, forwards, resized, sample_count
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.forecasting.step_seconds import Halves, exchanges
from lightning_ptm.planning.best_first import best_first
from lightning_ptm.planning.mesh import SAME_BATCH, Axis
from lightning_ptm.planning.schedules import has_equal_rounds
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.autograd.recompute import recomputed_around, recomputed_units
from lightning_ptm.runtime.autograd.slices import slices_of
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.runtime.units.divided_experts import expert_layers, experts_of
from lightning_ptm.terms import SEVERAL_CHUNKS, Link, Phase
from lightning_ptm.trainer.two_batch_steps import refuse_module

LISTED = 5
"""Number of runs that are listed."""
MOST = 24
"""Most runs that are predicted, by default."""

Candidate = Mapping[str, Any]
"""A value for each dimension."""
Make = Callable[[Mapping[str, Any], int], PlannedRun]
"""Makes the run with these settings and so many micro-batches in a step; raises ConfigError for those that it cannot have."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a run and its machines that decide which values each dimension may have.

    Attributes:
        world_size, ranks_per_node: numbers of ranks.
        experts: number of experts of each layer that has some.
        blocks: number of blocks that pipeline stages can divide; 0: the model cannot train in stages.
        overlaps: whether sums over tensor ranks can pass while half of a batch computes.
        recompute: the setting of runs that compute units in slices.
        samples: samples of a step over all ranks, which each candidate has; None: they are not chosen.
        batch: samples of a rank's batch in all candidates; None: they differ.
    """

    world_size: int
    ranks_per_node: int
    experts: tuple[int, ...]
    blocks: int
    overlaps: bool
    recompute: str
    samples: int | None
    batch: int | None


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting that the search chooses.

    Attributes:
        name: of the setting, or of the Trainer's argument; `tensor_parallel.overlap` is a field of a nested setting.
        values: returns the values to try, the one with the least effects first. The second argument has the values of the
            dimensions before it.
        axis: the axis along which it divides ranks; None: it does not.
    """

    name: str
    values: Callable[[Facts, Candidate], Sequence[Any]]
    axis: Axis | None = None


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _in_node(facts: Facts, chosen: Candidate) -> list[int]:
    """Sizes of an axis whose ranks exchange activations: all such axes together are in one node."""
    taken = math.prod(chosen.get(each.name, 1) for each in DIMENSIONS if each.axis is not None and each.axis.exchanges)
    return [size for size in _divisors(facts.ranks_per_node) if facts.ranks_per_node % (size * taken) == 0] or [1]


def _context(facts: Facts, chosen: Candidate) -> list[int]:
    """Returns sizes of groups that divide sequences."""
    return _in_node(facts, chosen)


def _of_experts(facts: Facts, chosen: Candidate) -> list[int]:
    taken = _taken(chosen)
    if _in_stages(chosen):
        return [1]
    return _divisors(math.gcd(facts.world_size // taken, *facts.experts) if facts.experts else 1)


def _taken(chosen: Candidate) -> int:
    """Returns the product of the chosen sizes of groups."""
    return math.prod(chosen.get(each.name, 1) for each in DIMENSIONS if each.axis is not None)


def _in_stages(chosen: Candidate) -> bool:
    return bool(chosen.get(Axis.STAGE.setting, 1) > 1)


def _stages(facts: Facts, chosen: Candidate) -> list[int]:
    """Returns numbers of stages; 1 alone in runs that divide experts."""
    if chosen[Axis.EXPERT.setting] > 1:
        return [1]
    return [size for size in _divisors(facts.world_size // _taken(chosen)) if size == 1 or size <= facts.blocks]


def _parts(facts: Facts, chosen: Candidate) -> list[int]:
    """Returns numbers of micro-batches that go through the stages: powers of 2 that divide the batch, which may be none; if
    the size of the batch is not known, 2, 4 and 8 times the number of stages."""
    if not _in_stages(chosen):
        return [1]
    batch = facts.batch if facts.samples is None else facts.samples // _replicas(facts, chosen)
    if batch is None:
        return [chosen[Axis.STAGE.setting] * times for times in (2, 4, 8)]
    return [size for size in _doublings(batch) if size > 1]


def _schedules(facts: Facts, chosen: Candidate) -> list[str]:
    """Returns schedules of stages, those with several runs of blocks on a stage where there are enough blocks."""
    if not _in_stages(chosen):
        return ["1f1b"]
    stages, parts = chosen[Axis.STAGE.setting], chosen[MICRO_BATCHES]
    several = facts.blocks >= 2 * stages
    in_rounds = several and has_equal_rounds(stages, parts)
    return ["1f1b", "gpipe", *["interleaved"] * in_rounds, *["breadth_first"] * several]


def _doublings(number: int) -> list[int]:
    return [1 << power for power in range(number.bit_length()) if number % (1 << power) == 0]


def _micro_batches(facts: Facts, chosen: Candidate) -> list[int | None]:
    """Numbers of batches of a step, by doubling, that divide its samples; pipeline stages take these as one batch. None: the
    Trainer's own."""
    if facts.samples is None:
        return [None]
    return [1] if _in_stages(chosen) else list(_doublings(facts.samples // _replicas(facts, chosen)))


def _samples(facts: Facts, chosen: Candidate) -> int | None:
    """Returns the samples of a rank in a batch; None: the most that fit."""
    if facts.samples is None:
        return facts.batch
    return facts.samples // _replicas(facts, chosen) // int(chosen[ACCUMULATE])


def _overlaps(facts: Facts, chosen: Candidate) -> list[str]:
    """Returns values of `TensorParallel.overlap`; `none` alone in runs that divide anything but layers and data."""
    tensor = chosen[Axis.TENSOR.setting]
    samples = _samples(facts, chosen)
    possible = facts.overlaps and 1 < tensor == _taken(chosen) and (samples is None or samples > 1)
    return ["none", "two_batches"] if possible else ["none"]


def _slices(facts: Facts, chosen: Candidate) -> list[int]:
    """Returns numbers of slices of a batch, by doubling, that divide its samples; if these are not known, up to 8. 1 alone
    in runs that divide anything but data, and for all settings of `recompute` but one, since units in slices are always
    recomputed."""
    sliceable = chosen["recompute"] == facts.recompute in ("auto", "none", "all")
    possible = _taken(chosen) == 1 and not facts.experts and sliceable
    return _doublings(_samples(facts, chosen) or 8) if possible else [1]


DIMENSIONS = (
    Dimension(Axis.TENSOR.setting, _in_node, Axis.TENSOR),
    Dimension(Axis.CONTEXT.setting, _context, Axis.CONTEXT),
    Dimension(Axis.EXPERT.setting, _of_experts, Axis.EXPERT),
    Dimension(Axis.STAGE.setting, _stages, Axis.STAGE),
    Dimension("recompute", lambda facts, chosen: ("auto", "all")),
    Dimension(MICRO_BATCHES, _parts),
    Dimension(SCHEDULE, _schedules),
    Dimension(ACCUMULATE, _micro_batches),
    Dimension(OVERLAP, _overlaps),
    Dimension(SLICES, _slices),
)
"""The settings that the search chooses, outermost first. Values that the run refuses, or that do not fit, are skipped."""
SIZES = tuple(each.name for each in DIMENSIONS if each.axis is not None)
"""The settings that divide ranks."""
OF_RUNS = tuple(each.name for each in DIMENSIONS if each.axis is None and each.name != ACCUMULATE)
"""The settings that runs with the same division may have different."""


def _replicas(facts: Facts, chosen: Candidate) -> int:
    """Returns the number of groups of ranks that compute different batches."""
    along = [each.name for each in DIMENSIONS if each.axis in SAME_BATCH]
    return facts.world_size // math.prod(chosen.get(name, 1) for name in along)


def as_settings(values: Candidate, settings: Settings) -> dict[str, Any]:
    """Returns values of dimensions as fields of `Settings`; those of nested settings keep the other fields of `settings`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        found[outer] = dataclasses.replace(getattr(settings, outer), **{inner: value}) if inner else value
    return found


def candidates(facts: Facts, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns all combinations of values.

    Args:
        given: settings of the user, which stay.
    """
    found: list[dict[str, Any]] = [dict(given)]
    for dimension in DIMENSIONS:
        if dimension.name not in given:
            found = [{**chosen, dimension.name: value} for chosen in found for value in dimension.values(facts, chosen)]
        if dimension.name == SIZES[-1]:
            found = [each for each in found if facts.world_size % _taken(each) == 0]
    return found


def choose(
    make: Make,
    name: str,
    node: Node,
    nodes: int,
    given: Mapping[str, Any],
    *,
    samples: Literal["auto"] | int | None = None,
    accumulate: int = 1,
    equal_steps: bool = True,
    looked_at: str = "",
    most: int = MOST,
) -> Choice:
    """Searches the fastest runs.

    Args:
        make: called for each division of the ranks.
        name, looked_at: see `Question`.
        given: settings of the user.
        samples: of a rank in a micro-batch; `auto`: the most that fit; None: those of the run's batch.
        accumulate: micro-batches of a step.
        equal_steps: whether all candidates have as many samples a step as the run with the sizes in `given`, in other
            micro-batches; if not, they have batches and micro-batches as given. Not with `auto`.
        most: most runs to predict.

    Raises:
        ConfigError: the run cannot be planned without division.
        CapacityError: nothing that was tried fits.
    """
    search = Search(make, name, node, nodes, given, samples, accumulate, equal_steps and samples != "auto", looked_at)
    return search.choice(most)


class Search:
    """The search of one `choose`, with the same arguments."""

    def __init__(
        self,
        make: Make,
        name: str,
        node: Node,
        nodes: int,
        given: Mapping[str, Any],
        samples: Literal["auto"] | int | None,
        accumulate: int,
        equal_steps: bool,
        looked_at: str = "",
    ) -> None:
        # Configuration.
        self._make, self._name, self._node, self._nodes, self._looked_at = make, name, node, nodes, looked_at
        self._accumulate = 1 if equal_steps else accumulate
        names = [each.name for each in DIMENSIONS]
        self.given = {key: value for key, value in given.items() if key in names}
        undivided = make({key: self.given.get(key, 1) for key in SIZES}, self._accumulate)
        tensor_parallel = undivided.request.settings.tensor_parallel
        written = given.get("tensor_parallel")
        if tensor_parallel.in_halves or (isinstance(written, Mapping) and "overlap" in written):
            self.given[OVERLAP] = tensor_parallel.overlap
        self._batch = sample_count(undivided.batch) if samples is None else samples
        experts = tuple(len(experts_of(layer)) for _, layer in expert_layers(undivided.model))
        fixed = self._batch if isinstance(self._batch, int) else None
        self.facts = Facts(
            world_size=node.ranks_per_node * nodes,
            ranks_per_node=node.ranks_per_node,
            experts=experts,
            blocks=0,
            # Between the CPUs of one machine, sums take the time of the cores that compute.
            overlaps=(node.has_own_memory or nodes > 1)
            and not tensor_parallel.sequence_parallel
            and _computes_in_halves(undivided),
            recompute=self.given.get("recompute", "auto"),
            samples=None,
            batch=fixed,
        )
        if equal_steps and fixed is not None:
            of_step = fixed * accumulate * _replicas(self.facts, self.given)
            self.facts = dataclasses.replace(self.facts, samples=of_step)
        blocks, self.no_stages = self._blocks(undivided)
        self.facts = dataclasses.replace(self.facts, blocks=blocks)
        if self.facts.world_size % (size := _taken(self.given)):
            sizes = ", ".join(f"{key}={self.given[key]}" for key in SIZES if self.given.get(key, 1) > 1)
            raise ConfigError(
                f"{sizes} takes groups of {size} ranks, and {self.facts.world_size} ranks cannot be divided so; "
                f"plan for a multiple of {size} ranks (--nodes), or leave sizes out, which are then chosen"
            )
        self.candidates = candidates(self.facts, self.given)
        # State.
        self._divisions: dict[tuple[int, ...], Division | str] = {}
        """The reason where the model cannot be divided so."""
        self._works: dict[tuple[int, ...], dict[int, tuple[UnitWork, ...]]] = {}
        """By all sizes but that of stages, the work of all units by samples (`PlannedRun.works`): stages divide units, and
        change none."""
        self._predictions: dict[int, Prediction] = {}
        """By candidate, what was predicted and fits."""
        self._short: dict[int, Prediction | AngelPTMError] = {}
        """By candidate, the prediction that does not fit, or the reason why it cannot be planned."""
        self._largest: dict[tuple[str, ...], int] = {}
        """By values of all dimensions but the micro-batches, the largest batch that fits, where a larger one did not."""

    def _blocks(self, undivided: PlannedRun) -> tuple[int, str]:
        """Returns the number of blocks that stages can divide, and the reason if it is 0."""
        if self.facts.world_size == 1:
            return 0, ""
        if Axis.STAGE.setting in self.given:
            return len(discover(undivided.model, undivided.request.settings.units)) - 1, ""
        sizes = {key: self.given.get(key, 1) for key in SIZES}
        try:
            run = self._make({**sizes, Axis.STAGE.setting: 2, MICRO_BATCHES: 2}, self._accumulate)
            units = discover(run.model, run.request.settings.units)
            blocks = len(units) - 1
            if blocks < 2:
                return 0, f"the model has {blocks} block{'s' * (blocks != 1)}, which stages cannot divide"
            run.model.to(run.request.compute)
            runs = [range(1, blocks // 2 + 1), range(blocks // 2 + 1, blocks + 1)]
            check_stages(run.model, units, runs, 2, resized(run.batch, 1), run.request.compute)
        except ConfigError as error:
            return 0, str(error)
        return blocks, ""

    def choice(self, most: int) -> Choice:
        """Searches with at most so many predictions, and describes what was found."""
        places = range(len(self.candidates))
        bounds = [self.bound(place) for place in places]
        alone = len({self.sizes(place) for place in places}) == 1
        found = best_first(
            places,
            bounds.__getitem__,
            self.cost,
            group=(lambda place: place) if alone else self.sizes,
            wanted=LISTED,
            goes_on=lambda: len(self._predictions) + len(self._short) < most,
        )
        if not found.best:
            raise self._nothing_found()
        best = [self._predictions[place] for place in found.best]
        better = min(
            (place for place in self._short if 0 < bounds[place] < 1 / best[0].samples_per_s),
            key=bounds.__getitem__,
            default=None,
        )
        wins = [next_wins(best[0], best[1])] if len(best) > 1 else []
        if better is not None:
            wins.append(self._faster_if_it_fitted(better, bounds[better], found.best[0]))
        return Choice(
            ranked=tuple(
                Ranked(dict(self.candidates[place]), each, why(each, best[0]))
                for place, each in zip(found.best, best, strict=True)
            ),
            samples=self.facts.samples,
            given=self.given,
            varied=tuple(
                each.name
                for each in DIMENSIONS
                if any(candidate[each.name] != self.candidates[0][each.name] for candidate in self.candidates)
            ),
            candidates=len(self.candidates),
            predicted=len(self._predictions) + len(self._short),
            proven=found.proven,
            next_wins=tuple(wins),
            refused={
                words(dict(zip(SIZES, sizes, strict=True)), self.facts.world_size): each
                for sizes, each in self._divisions.items()
                if isinstance(each, str)
            },
            no_stages=self.no_stages,
        )

    def bound(self, place: int) -> float:
        """Returns the least seconds of a sample with a candidate; infinity if the model cannot have its sizes."""
        division, values = self._division(place), self.candidates[place]
        if isinstance(division, str):
            return math.inf
        return division.least_s(values, self._samples(place))

    def cost(self, place: int) -> float | None:
        """Predicts a candidate; returns the seconds of a sample, or None if it does not fit or cannot be."""
        division, values = self._division(place), self.candidates[place]
        samples = self._samples(place)
        others = tuple(repr(value) for key, value in values.items() if key != ACCUMULATE)
        if isinstance(division, str):
            return None
        if samples is not None and samples > self._largest.get(others, samples):
            return None
        chosen = {name: values[name] for name in OF_RUNS}
        try:
            run = division.run.with_settings(**as_settings(chosen, division.run.request.settings))
            if (values[ACCUMULATE] or 1) > 1:
                run = run.accumulating(values[ACCUMULATE])
            question = Question(run, self._name, self._node, self._nodes, samples or "auto", looked_at=self._looked_at)
            found, _ = question.answer(None)
        except (ConfigError, CapacityError) as error:
            self._short[place] = error
            return None
        if values[OVERLAP] != "none" and found.fits and found.batch_size < 2:
            return None  # it has no halves
        if not found.fits:
            self._short[place] = found
            largest = None if samples is None else question.largest_batch(found, samples)
            if samples is not None and largest is not None and largest < samples:
                self._largest[others] = largest
            return None
        self._predictions[place] = found
        return 1 / found.samples_per_s

    def sizes(self, place: int) -> tuple[int, ...]:
        return tuple(self.candidates[place][name] for name in SIZES)

    def _samples(self, place: int) -> int | None:
        """Samples of a rank in a micro-batch; None: the most that fit."""
        return _samples(self.facts, self.candidates[place])

    def _division(self, place: int) -> Division | str:
        """Returns the division of the ranks with the candidate's schedule, or the reason why the model cannot have it."""
        sizes = self.sizes(place)
        if sizes not in self._divisions:
            try:
                values = dict(zip(SIZES, sizes, strict=True))
                parts = {MICRO_BATCHES: self.given.get(MICRO_BATCHES, 2)} if _in_stages(values) else {}
                run = self._make({**values, **parts}, self._accumulate)
                cut = tuple(size for name, size in values.items() if name != Axis.STAGE.setting)
                run.share_work(self._works.setdefault(cut, run.works))
                self._divisions[sizes] = Division(run, self._node, self._nodes)
            except ConfigError as error:
                self._divisions[sizes] = str(error)
        found = self._divisions[sizes]
        try:
            return found if isinstance(found, str) else found.with_schedule(self.candidates[place][SCHEDULE])
        except ConfigError as error:
            return str(error)

    def _nothing_found(self) -> AngelPTMError:
        """Returns the error of a search that found nothing: the number of candidates, and the reason of the last one."""
        tried = list(self._short.values())
        count = f"none of {len(self.candidates)} candidates"
        refused = [each for each in self._divisions.values() if isinstance(each, str)]
        unknown = [str(each) for each in tried if isinstance(each, ConfigError)]
        if len(unknown) == len(tried):  # of each the reason is the model or a setting, not memory
            return ConfigError(
                f"{count} can be planned; the last one: {(unknown or refused or [''])[-1]}; change what it names, or give "
                f"sizes with which the model can be planned"
            )
        last = next(each for each in reversed(tried) if not isinstance(each, ConfigError))
        reason = last.reason if isinstance(last, Prediction) else str(last)
        return CapacityError(
            f"{count} fits, of which {len(tried)} were predicted; the last one: {reason}; plan one of them by itself for "
            f"what would fit, or use more ranks"
        )

    def _faster_if_it_fitted(self, place: int, least_s: float, best: int) -> str:
        short = self._short[place]
        reason = short.reason if isinstance(short, Prediction) else str(short).partition(";")[0]
        gain = 1 / self._predictions[best].samples_per_s / least_s
        other = differences(self.candidates[place], self.candidates[best])
        return (
            f"{words(self.candidates[place], self.facts.world_size)}{other and f' with {other}'} could be up to {gain:.3g} "
            f"times as fast as 1, but does not fit: {reason}"
        )


def _computes_in_halves(run: PlannedRun) -> bool:
    """Returns whether a model can train on halves of a batch, as far as its modules tell."""
    try:
        refuse_module(run.model)
    except ConfigError:
        return False
    return True


def _through_stages_s(each_s: Sequence[float], parts: int, chunks: int) -> float:
    """Returns a lower bound of the seconds in which micro-batches go through stages and back.

    A stage computes all micro-batches, and waits while the first chunks of the stages before it compute the first forward and
    the last backward.

    Args:
        each_s: by stage, seconds of a micro-batch.
        chunks: runs of blocks of each stage, equally long (forecasting/pipeline.py).
    """
    return max(sum(each_s[:stage]) / chunks + parts * seconds for stage, seconds in enumerate(each_s))


class Division:
    """One division of the ranks, and lower bounds of its runs' seconds.

    Args:
        run: the run with these sizes.
    """

    def __init__(self, run: PlannedRun, node: Node, nodes: int) -> None:
        self.run = run
        self._node = node
        self._nodes = nodes
        self._dtype = str(run.request.compute).removeprefix("torch.")
        self._by_schedule: dict[str, Division] = {}
        self._busy: dict[tuple[Any, ...], list[float]] = {}
        try:
            self._blueprint: Blueprint | None = decide(run.request, node.machine(), node.ranks_per_node * nodes)
        except CapacityError:  # with other settings it may fit
            self._blueprint = None
            return
        self._rates: Hardware = node.rates(nodes, self._blueprint.holders)
        self._replicas = len(self._blueprint.holders.mesh.replicas)
        run.model.to(run.request.compute)

    def with_schedule(self, schedule: str) -> Division:
        """Returns the same division with stages that have as many runs of blocks as in another schedule."""
        own = self.run.request.settings.pipeline_schedule
        if schedule == own or not {schedule, own} & {*SEVERAL_CHUNKS}:
            return self
        if schedule not in self._by_schedule:
            run = self.run.with_settings(pipeline_schedule=schedule)
            self._by_schedule[schedule] = Division(run, self._node, self._nodes)
        return self._by_schedule[schedule]

    def least_s(self, values: Candidate, samples: int | None) -> float:
        """Returns the least seconds of a sample: those of compute and exchanges, and those of collectives.

        Seconds of a micro-batch are convex in its samples (a unit takes the longer of its arithmetic and its launches, and
        the longer of that and of hidden exchanges), so those of one and of two samples bound all others.

        Args:
            values: of all dimensions.
            samples: of a rank in a batch; None: as many as fit.
        """
        if self._blueprint is None:
            return 0.0
        parts, accumulate = values[MICRO_BATCHES], values[ACCUMULATE] or self.run.accumulate
        try:
            one, two = (self._busy_s(each, values) for each in (1, 2))
        except ConfigError:  # a model may make its own batch, and accept no other size
            return 0.0
        more = [max(0.0, second - first) for first, second in zip(one, two, strict=True)]
        if samples is None:
            least = [min(each) for each in zip(one, more, strict=True)]
            return _through_stages_s(least, parts, self._chunks) / (parts * self._replicas)
        each_s = [first + (samples / parts - 1) * further for first, further in zip(one, more, strict=True)]
        once = values[SCHEDULE] == "breadth_first"  # in a batch, units are gathered
        passes = 1 if once else parts
        collectives_s = passes * self._collectives_s(passes * accumulate)
        return max(_through_stages_s(each_s, parts, self._chunks), collectives_s) / (samples * self._replicas)

    @property
    def _chunks(self) -> int:
        assert self._blueprint is not None
        return self._blueprint.holders.runs_of_stage

    def _busy_s(self, samples: int, values: Candidate) -> list[float]:
        """Seconds of compute and of exchanges in a micro-batch, by stage."""
        key = (samples, *(repr(values[name]) for name in ("recompute", OVERLAP, SLICES)))
        if key not in self._busy:
            halves = Halves.NONE if values[OVERLAP] == "none" else Halves.HIDING
            self._busy[key] = self._computed_s(samples, values["recompute"], values[SLICES], halves)
        return self._busy[key]

    def _computed_s(
        self, samples: int, recompute: str, wanted_slices: int | Mapping[str, int], halves: Halves
    ) -> list[float]:
        run, blueprint, node = self.run, self._blueprint, self._node
        assert blueprint is not None
        every = dataclasses.replace(run.request.settings, recompute=recompute).recompute_every
        recomputed = recomputed_units(len(blueprint.units), every, slices_of(blueprint.units, wanted_slices))
        again = recomputed_around(blueprint.units, recomputed)
        whole = run.work(blueprint, samples)
        found = []
        for stage, trace in self._traces(blueprint):
            works = whole if stage is None else stage.works(whole, {tick.unit for tick in trace.ticks})
            sent = exchanges(blueprint, works, trace, again, halves)
            seconds = 0.0
            for at, tick in enumerate(trace.ticks):
                times = forwards(tick.phase, recomputed=tick.unit in recomputed or tick.unit in again)
                compute_s = halves.calls * (node.unit_s or 0.0)
                compute_s += times * node.seconds(works[tick.unit], self._dtype, halves.calls)
                orders = sent.get(at, {}).items()
                each_s = [(each.bytes / self._rates.bytes_per_s(link), each.hidden) for link, each in orders]
                seconds += max(compute_s, *(one_s for one_s, hidden in each_s if hidden), 0.0)
                seconds += sum(one_s for one_s, hidden in each_s if not hidden)
            found.append(seconds)
        return found

    def _traces(self, blueprint: Blueprint) -> list[tuple[Stage | None, Trace]]:
        """The ticks of each stage; the blueprint is that of the last one."""
        mesh, last = blueprint.holders.mesh, blueprint.trace
        stages = mesh.sizes[Axis.STAGE]
        if stages == 1:
            return [(None, last)]
        own: dict[int, list[Tick]] = {stage: [tick for tick in last.ticks if tick.unit == 0] for stage in range(stages)}
        for unit, ranks in blueprint.holders.ranks_by_unit.items():
            own[mesh.stage(ranks[0])] += [Tick(unit, phase, (unit,)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
        return [(Stage(stage, last=stage == stages - 1), Trace(tuple(ticks))) for stage, ticks in own.items()]

    def _collectives_s(self, micro_batches: int) -> float:
        """Seconds of a micro-batch's collectives if each flat is gathered and reduced once."""
        blueprint = self._blueprint
        assert blueprint is not None
        each_step = self.run.request.settings.tuning.reduce_gradients == "each_step"
        reduced = 1 / micro_batches if each_step else 1
        found = 0.0
        for flat in blueprint.layout.flats:
            once = flat.unit == 0 and blueprint.holders.in_stages  # in a batch
            if flat.shared and not once and flat.unit not in blueprint.by_need:
                rate = self._rates.shared_bytes_per_s.get(blueprint.holders.of_flat(flat).axes)
                size = flat.shard_bytes * (flat.world_size - 1)
                seconds = size / (rate or self._rates.bytes_per_s(Link.COLLECTIVE))
                found += seconds * (1 + reduced * flat.trainable)
        return found
