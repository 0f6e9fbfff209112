"""The experiments of the Oases paper (overlapped tensor parallelism), priced by our planner.

The paper trains seven GPTs on two clusters of RTX 3090, and publishes shares of time in which GPUs compute (Table 2) and
throughput (Table 3). It does not give the rates of links and GPUs: `Calibration` derives them from published rows, and the
schedules are computed from them. Work, sums, bytes and the clock are the planner's.

What the four schedules do with the sums of a layer (paper, section 3): Megatron-LM waits for all, also in
recomputation; Merak overlaps two halves of a batch inside of each pass; cross-pass overlaps recomputation and backward
together; fine-grained recomputation repeats no sum, as ours.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from benchmarks.unit_degrees import ROOT, Degrees, Option, Uniform, busy_by_unit, fastest, in_words
from lightning_ptm.commands.garbage import without_collections
from lightning_ptm.forecasting import hardware as machines
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.rates import Hardware
from lightning_ptm.forecasting.send_order import NOTHING_SENT, SendOrder
from lightning_ptm.planning.trace import Tick
from lightning_ptm.terms import Link, Phase

NODES, GPUS, TOKENS, VOCABULARY = 8, 32, 1024, 51_200
STATE_BYTES = 18  # of a parameter: PatrickStar, section 8.2.1, for PyTorch
NETWORK_BYTES_PER_S = 12.5e9  # section 5.1: InfiniBand of 100 Gb/s


@dataclass(frozen=True, slots=True)
class Model:
    """A row of Table 4."""

    layers: int
    heads: int
    degree: int
    samples: int


MODELS = {
    1024: Model(24, 16, 2, 256),
    2048: Model(24, 32, 4, 128),
    3072: Model(24, 48, 4, 32),
    4096: Model(16, 64, 4, 32),
    6144: Model(16, 96, 8, 8),
    8192: Model(8, 128, 8, 8),
    12288: Model(4, 192, 8, 8),
}
"""By width."""
CLUSTERS = ("NVLink 3090", "3090")
EFFICIENCY = {  # Table 2: by cluster and system, percent of time in which GPUs compute
    ("NVLink 3090", "Megatron-LM"): (83.9, 47.2, 53.7, 57.5, 32.9, 37.4, 44.4),
    ("NVLink 3090", "Oases"): (97.8, 88.5, 90.1, 93.2, 62.7, 70.4, 77.9),
    ("3090", "Megatron-LM"): (56.2, 36.4, 43.2, 47.4, 28.6, 32.5, 39.7),
    ("3090", "Oases"): (96.4, 78.9, 87.0, 90.0, 62.3, 70.0, 77.9),
}
THROUGHPUT = {  # Table 3: by cluster and width, thousands of tokens/s of the schedules, and of Oases with its planner
    ("NVLink 3090", 2048): (31.4, 37.3, 41.2, 43.9, 50.9),
    ("NVLink 3090", 4096): (18.1, 21.5, 22.6, 23.8, 25.2),
    ("NVLink 3090", 8192): (5.6, 6.9, 7.7, 8.9, 9.1),
    ("3090", 2048): (23.0, 29.2, 32.6, 42.5, 44.7),
    ("3090", 4096): (14.0, 17.9, 22.4, 23.8, 24.3),
    ("3090", 8192): (5.3, 6.2, 7.7, 8.9, 9.0),
}
STRATEGY = {2048: (2, 8, 4, 16), 4096: (2, 10, 4, 6), 8192: (4, 2, 8, 6)}
"""Table 6: by width, the planner's degrees on both clusters: a degree, number of layers with it, and the same again."""
CALIBRATED = {2: 1024, 4: 2048, 8: 8192}
"""By degree, the width whose row of Megatron-LM in Table 2 gives the rate of sums among so many ranks."""


class Schedule(enum.Enum):
    """Which sums overlap with which compute."""

    MEGATRON = "Megatron-LM"
    MERAK = "Merak"
    CROSS_PASS = "cross-pass schedule"
    FINE_GRAINED = "fine-grained recomputation"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates of a cluster, derived from published rows.

    Attributes:
        slower: seconds of compute of Megatron-LM for each second of the hardware file's.
        halves_slower: the same for two halves of a batch, over Megatron-LM's.
        sum_bytes_per_s: by degree, bytes per second that a rank sends in sums.
    """

    slower: float
    halves_slower: float
    sum_bytes_per_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class OasesAsk:
    """Asks for the prices of all rows."""


@dataclass(frozen=True, slots=True)
class OasesAnswer:
    """Prices of all rows; seconds are of a step.

    Attributes:
        calibrations: by cluster.
        seconds: by cluster, width and schedule.
        compute_s: by cluster and width, of Megatron-LM.
        theirs_s: by cluster and width, with the degrees of Table 6; `fine-grained recomputation`.
        planned: by cluster and width, the degrees that the search finds, and the seconds with them.
        memory_bytes: by width, of a rank with the least degree that was tried for all units.
        runs_s: by cluster and width whose sums stay in a node, virtual runs of ours: with sums that compute waits for, and
            with two halves of a batch.
    """

    calibrations: Mapping[str, Calibration]
    seconds: Mapping[tuple[str, int, Schedule], float]
    compute_s: Mapping[tuple[str, int], float]
    theirs_s: Mapping[tuple[str, int], float]
    planned: Mapping[tuple[str, int], tuple[str, float]]
    memory_bytes: Mapping[int, int]
    runs_s: Mapping[tuple[str, int], tuple[float, float]]


def oases_answer(_: OasesAsk) -> OasesAnswer:
    """Prices all rows."""
    with without_collections():
        return _Prices().answer()


class _Prices:
    """Virtual runs of all models with their degrees, and with half of these where the planner is priced."""

    def __init__(self) -> None:
        self._node = replace(
            machines.look_up("rtx3090", 4), inter_node_bytes_per_s=NETWORK_BYTES_PER_S, host_memory=128 << 30
        )
        self._degrees = {width: self._of(width, model) for width, model in MODELS.items()}
        self._of_megatron = {width: self._degrees[width].uniform[model.degree] for width, model in MODELS.items()}
        self._slower = self._compute_slower("Megatron-LM", 0)
        self._halves_slower = self._compute_slower("Oases", -1) / self._slower
        self.calibrations = {
            cluster: Calibration(self._slower, self._halves_slower, self._rates(cluster)) for cluster in CLUSTERS
        }

    def answer(self) -> OasesAnswer:
        """All prices."""
        seconds, compute_s = {}, {}
        for cluster in CLUSTERS:
            for width, uniform in self._of_megatron.items():
                compute_s[cluster, width] = self._slower * _compute_s(uniform)
                for schedule in Schedule:
                    seconds[cluster, width, schedule] = sum(self._busy_s(cluster, uniform, schedule))
        theirs, planned, memory, runs = {}, {}, {}, {}
        for cluster in CLUSTERS:
            for width in STRATEGY:
                theirs[cluster, width], planned[cluster, width] = self._planned(cluster, width)
                if MODELS[width].degree <= self._node.ranks_per_node:
                    runs[cluster, width] = self._runs(cluster, width)
        for width in STRATEGY:
            options = self._degrees[width].uniform[MODELS[width].degree // 2].options
            memory[width] = sum(each.kept_bytes for each in options) + max(each.peak_bytes for each in options)
        return OasesAnswer(self.calibrations, seconds, compute_s, theirs, planned, memory, runs)

    def _of(self, width: int, model: Model, node: Node | None = None, **strategy: Any) -> Degrees:
        tried = (model.degree // 2, model.degree) if width in STRATEGY and not strategy else (model.degree,)
        return Degrees(
            _document(width, model), lambda _: node or self._node, NODES, model.samples, tried, strategy, STATE_BYTES
        )

    def _compute_slower(self, system: str, place: int) -> float:
        """Returns the mean, over the rows of Table 3, of seconds of compute by the published shares for each second of ours.

        Args:
            place: the system's in `THROUGHPUT`.
        """
        ratios = []
        for (cluster, width), rates in THROUGHPUT.items():
            step_s = MODELS[width].samples * TOKENS / (1000 * rates[place])
            computes = EFFICIENCY[cluster, system][list(MODELS).index(width)] / 100
            ratios.append(step_s * computes / _compute_s(self._of_megatron[width]))
        return statistics.fmean(ratios)

    def _rates(self, cluster: str) -> dict[int, float]:
        """Bytes per second of sums, from the shares of time in which GPUs do not compute."""
        found = {}
        for degree, width in CALIBRATED.items():
            uniform = self._of_megatron[width]
            computes = EFFICIENCY[cluster, Schedule.MEGATRON.value][list(MODELS).index(width)] / 100
            idle_s = self._slower * _compute_s(uniform) * (1 / computes - 1)
            sent = sum(
                order.bytes for _, orders in passes(uniform, Schedule.MEGATRON, 1.0) for order in orders.values()
            )
            found[degree] = sent / idle_s
        return found

    def _hardware(self, cluster: str, uniform: Uniform) -> Hardware:
        rate = self.calibrations[cluster].sum_bytes_per_s[uniform.degree]
        return replace(uniform.rates, tensor_exchange_bytes_per_s=rate)

    def _busy_s(self, cluster: str, uniform: Uniform, schedule: Schedule) -> list[float]:
        slower = self._slower * (1.0 if schedule is Schedule.MEGATRON else self._halves_slower)
        return busy_by_unit(uniform.blueprint, passes(uniform, schedule, slower), self._hardware(cluster, uniform))

    def _planned(self, cluster: str, width: int) -> tuple[float, tuple[str, float]]:
        """Seconds with the published degrees, and the fastest degrees that fit with their seconds."""
        degrees = self._degrees[width]
        options = {}
        for degree, uniform in degrees.uniform.items():
            busy_s = self._busy_s(cluster, uniform, Schedule.FINE_GRAINED)
            options[degree] = [replace(each, busy_s=busy) for each, busy in zip(uniform.options, busy_s, strict=True)]
        rates = self.calibrations[cluster].sum_bytes_per_s

        def between(unit: int, before: Option, after: Option) -> float:
            if before.degree == after.degree:
                return 0.0
            return degrees.handed_bytes(unit, before.degree, after.degree) / rates[max(before.degree, after.degree)]

        first, firsts, second, seconds = STRATEGY[width]
        # The embeddings and the head, which the paper does not name, have the model's degree.
        published = [MODELS[width].degree, *[first] * firsts, *[second] * seconds]
        theirs = fastest([[options[degree][unit]] for unit, degree in enumerate(published)], between)
        units = [[options[degree][unit] for degree in options] for unit in range(len(published))]
        best = fastest(units, between, room_bytes=degrees.room_bytes)
        assert theirs is not None and best is not None
        return theirs.seconds, (in_words(best.degrees), best.seconds)

    def _runs(self, cluster: str, width: int) -> tuple[float, float]:
        """Seconds of virtual runs with pages: with sums that compute waits for, and with two halves of a batch."""
        model, calibration = MODELS[width], self.calibrations[cluster]
        rate = calibration.sum_bytes_per_s[model.degree]
        node = replace(
            self._node,
            compute_efficiency=self._node.compute_efficiency / self._slower,
            tensor_exchange_bytes_per_s=rate,
        )
        found = self._of(width, model, node, recompute="all").uniform[model.degree].prediction
        assert found.seconds is not None and found.other_overlap_s is not None
        return found.seconds, found.other_overlap_s


def _document(width: int, model: Model) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "configs" / "gpt3_13b.yaml").read_text())
    document["trainer"] |= {"gradient_clip_val": None, "precision": "16-mixed"}
    sizes = document["model"]["init_args"]
    sizes |= {"vocab_size": VOCABULARY, "width": width, "layers": model.layers, "heads": model.heads}
    sizes |= {"sequence_length": TOKENS, "feed_forward_width": 4 * width, "head_width": width // model.heads}
    document["data"]["init_args"] |= {"sequence_length": TOKENS}
    return dict(document)


def _compute_s(uniform: Uniform) -> float:
    return sum(tick.seconds for tick in uniform.trace.ticks)


def passes(uniform: Uniform, schedule: Schedule, slower: float) -> Iterator[tuple[Tick, Mapping[Link, SendOrder]]]:
    """Yields compute and sums that overlap, one pair after another, in a schedule.

    Args:
        slower: seconds of compute for each second of the virtual run's.
    """
    forward = {
        tick.unit: uniform.exchanged.get(at, {}).get(Link.TENSOR_EXCHANGE, NOTHING_SENT)
        for at, tick in enumerate(uniform.trace.ticks)
        if tick.phase is Phase.FORWARD
    }
    hidden = schedule is not Schedule.MEGATRON

    def at_once(tick: Tick, seconds: float, *orders: SendOrder) -> tuple[Tick, Mapping[Link, SendOrder]]:
        sent = sum(orders, NOTHING_SENT)
        sent = sent.of_two_halves(hidden=True) if hidden else sent
        return replace(tick, seconds=slower * seconds), {Link.TENSOR_EXCHANGE: sent} if sent.collectives else {}

    for at, tick in enumerate(uniform.trace.ticks):
        own = uniform.exchanged.get(at, {}).get(Link.TENSOR_EXCHANGE, NOTHING_SENT)
        again = forward[tick.unit] if tick.unit else NOTHING_SENT  # the root is not recomputed
        if tick.phase is Phase.FORWARD or schedule is Schedule.FINE_GRAINED:
            yield at_once(tick, tick.seconds, own)
        elif schedule is Schedule.MERAK and tick.unit:  # recomputation, then backward: one forward and two
            yield at_once(tick, tick.seconds / 3, again)
            yield at_once(tick, 2 * tick.seconds / 3, own)
        else:
            yield at_once(tick, tick.seconds, own, again)


def published(cluster: str, width: int) -> Sequence[float]:
    """Returns the speedups over Megatron-LM in Table 3."""
    first, *others = THROUGHPUT[cluster, width]
    return [each / first for each in others]
