"""Result of `lightning-ptm plan --parallel auto`: as data, as text and as JSON, of the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from lightning_ptm.commands.proposals import ACCUMULATE
from lightning_ptm.config import Settings, format_bytes
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.terms import Link, Operation

MICRO_BATCHES, SCHEDULE = OF_PIPELINE = "micro_batches", "pipeline_schedule"
"""Settings that only runs with pipeline stages have."""
OVERLAP, SLICES = "tensor_parallel.overlap", "slices"
_SIZE = "_parallel_size"
"""End of the names of settings that divide ranks."""
_SLIGHTLY = 0.005
"""Share of a step below which a difference is not explained."""
_FASTEST = 10
"""Most times by which a link may be said to have to be faster."""
_CAUSES = {
    Operation.GATHER: "parameters of other ranks",
    Operation.REDUCE: "sums of gradients over ranks",
    Operation.EXCHANGE: "exchanges of activations",
    Operation.FETCH: "copies of parameters to the device",
    Operation.EVICT: "copies from the device",
    Operation.OFFLOAD: "copies of gradients from the device",
    Operation.UPDATE: "updates",
}
_LINKS = {
    Operation.GATHER: (Link.COLLECTIVE,),
    Operation.REDUCE: (Link.COLLECTIVE,),
    Operation.EXCHANGE: (Link.EXCHANGE, Link.TENSOR_EXCHANGE),
    Operation.FETCH: (Link.HOST_TO_DEVICE, Link.DISK_READ),
    Operation.UPDATE: (Link.UPDATE_HOST, Link.UPDATE_DEVICE, Link.DISK_READ, Link.DISK_WRITE),
}
"""Links that compute may wait for, by cause."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A listed run.

    Attributes:
        values: of all dimensions of the choice.
        why: what its step consists of, or what it loses to the first one, in a sentence.
    """

    values: dict[str, Any]
    prediction: Prediction
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class Choice:
    """Result of the search, fastest first: of each division of the ranks its fastest run; with one division all runs.

    Attributes:
        samples: samples of a step over all ranks, equal in all runs; None: they differ.
        given: values that the user has set, by name.
        varied: names of what has several values among the candidates.
        candidates, predicted: numbers of runs.
        proven: whether no other division can be faster than the last in `ranked`.
        next_wins: what would have to change for another run to be the fastest; sentences.
        refused: divisions that the model cannot have, with the reason.
        no_stages: the reason why no run has pipeline stages; empty: some have, or the user has set their number.
    """

    ranked: tuple[Ranked, ...]
    samples: int | None
    given: dict[str, Any]
    varied: tuple[str, ...]
    candidates: int
    predicted: int
    proven: bool
    next_wins: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    no_stages: str = ""

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of the fastest run that are neither the user's nor the defaults."""
        default = Settings()
        found = {key: value for key, value in self.ranked[0].values.items() if key != ACCUMULATE}
        free = {key: value for key, value in found.items() if key not in self.given}
        return {key: value for key, value in free.items() if attrgetter(key)(default) != value}

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `lightning-ptm plan --parallel auto --json`."""
        return {
            "samples_per_step": self.samples,
            "given": self.given,
            "candidates": self.candidates,
            "predicted": self.predicted,
            "proven": self.proven,
            "best": [
                {"settings": each.values, "why": each.why, "prediction": each.prediction.to_dict()}
                for each in self.ranked
            ],
            "next_wins": list(self.next_wins),
            "refused": self.refused,
            "no_stages": self.no_stages,
        }


def words(values: Mapping[str, Any], world_size: int) -> str:
    """Returns the sizes of a division, such as `data 4 x tensor 2`."""
    sizes = {key.removesuffix(_SIZE): value for key, value in values.items() if key.endswith(_SIZE)}
    sizes = {"data": world_size // math.prod(sizes.values()), **sizes}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


def differences(values: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Returns the values that differ from others, but those that divide ranks, such as `recompute=all, micro_batches=8`."""
    return _settings(
        {key: value for key, value in values.items() if not key.endswith(_SIZE) and value not in (None, others[key])}
    )


def why(found: Prediction, best: Prediction) -> str:
    """Says what the step of a run consists of, if it is the best, or else what it loses to the best."""
    parts = _parts(found)
    if found is best:
        waits = {name: seconds for name, seconds in parts.items() if name != _COMPUTE and seconds > 0}
        said = f"compute takes {parts[_COMPUTE] / sum(parts.values()):.0%} of the step"
        if not waits:
            return f"{said}, which waits for nothing"
        most = max(waits, key=waits.__getitem__)
        return f"{said}; the longest wait is {waits[most]:.3g} s for {most}"
    lost = _lost(found, best)
    slower = sum(lost.values())
    most = max(lost, key=lost.__getitem__)
    step = best.seconds or 0.0
    if slower < _SLIGHTLY * step:
        return f"as fast as 1 within {_SLIGHTLY:.1%}"
    which = "compute" if most == _COMPUTE else f"waits for {most}"
    return f"{slower:.3g} s slower than 1 for as many samples: {lost[most]:.3g} s more {which}"


def next_wins(best: Prediction, second: Prediction) -> str:
    """Says by how much the rate has to grow that the second run needs more than the best, for it to be as fast."""
    lost = _lost(second, best)
    slower, most = sum(lost.values()), max(lost, key=lost.__getitem__)
    if slower <= 0:
        return "2 is as fast as 1"
    less = f"{slower:.3g} s less for as many samples"
    if most == _COMPUTE:
        return f"2 would win if its compute took {less}"
    cause = next((cause for cause, name in _CAUSES.items() if name == most), None)
    scale, links = _scale(second, best), () if cause is None else _LINKS.get(cause, ())
    shrunk = {}
    for link in links:
        of_second, of_best = (_busy_s(each, link) for each in (second, best))
        exposed = [min(busy, _waits_s(each, cause)) for busy, each in ((of_second, second), (of_best, best))]
        needed = _shrinking((scale * of_second, scale * exposed[0]), (of_best, exposed[1]), slower)
        if needed is not None:
            shrunk[link] = needed
    if not shrunk:
        return f"2 would win if its waits for {most} took {less}"
    link = min(shrunk, key=shrunk.__getitem__)
    factor = 1 / (1 - shrunk[link])
    return f"2 would win if {link.value.replace('_', ' ')} were {factor:.3g} times as fast, and all else the same"


def _shrinking(second: tuple[float, float], best: tuple[float, float], slower_s: float) -> float | None:
    """Returns the share by which a link's seconds have to shrink for the second run to gain so much more than the best, which
    uses the link, too; None: a link `_FASTEST` times as fast does not suffice.

    Args:
        second, best: seconds in which the link is busy, and those of them for which compute waits: a run gains no more.
    """

    def gained(share: float) -> float:
        (busy, exposed), (best_busy, best_exposed) = second, best
        return min(exposed, busy * share) - min(best_exposed, best_busy * share)

    most = 1 - 1 / _FASTEST
    bends = (exposed / busy for busy, exposed in (second, best) if busy)
    before = 0.0
    for share in sorted({most, *(each for each in bends if each < most)}):
        if gained(share) >= slower_s:
            return before + (share - before) * (slower_s - gained(before)) / (gained(share) - gained(before))
        before = share
    return None


_COMPUTE = "compute"


def _parts(found: Prediction) -> dict[str, float]:
    """Seconds of a step by what they are for; their sum is the step."""
    timing = found.timing
    assert timing is not None
    parts = {_COMPUTE: timing.compute_s}
    for stall in timing.stalls:
        name = _CAUSES.get(stall.cause, stall.cause.value)
        parts[name] = parts.get(name, 0.0) + stall.seconds
    parts |= {
        "control messages": timing.rounds_s,
        "other stages": found.stages_wait_s,
        "lock-free updates": found.lock_free_s,
        "copies of activations": found.copies_s,
        "other work of the CPU": found.other_s,
    }
    return parts


def _scale(found: Prediction, best: Prediction) -> float:
    """Steps of a run for the samples of one step of the best."""
    assert found.seconds and best.seconds
    return (best.samples_per_s * best.seconds) / (found.samples_per_s * found.seconds)


def _lost(found: Prediction, best: Prediction) -> dict[str, float]:
    """Seconds that a run takes longer than the best for as many samples as a step of the best has, by what they are for."""
    scale, of_best = _scale(found, best), _parts(best)
    parts = _parts(found)
    return {name: scale * parts.get(name, 0.0) - of_best.get(name, 0.0) for name in parts | of_best}


def _busy_s(found: Prediction, link: Link) -> float:
    assert found.timing is not None
    return sum(use.busy_s for use in found.timing.links if use.link is link)


def _waits_s(found: Prediction, cause: Operation | None) -> float:
    assert found.timing is not None
    return sum(stall.seconds for stall in found.timing.stalls if stall.cause is cause)


def render(choice: Choice) -> str:
    """The text that `plan --parallel auto` prints: a table, reasons below each row, and how to train so."""
    first = choice.ranked[0].prediction
    ranks = f"{first.ranks:,} rank{'' if first.ranks == 1 else 's'}"
    samples = "" if choice.samples is None else f", {choice.samples:,} samples a step in all of them"
    searched = f"{choice.candidates} candidates, of which {choice.predicted} were predicted"
    if choice.proven:
        ended = "no other is faster than those listed"
    else:
        ended = "the search ended there (--most predicts more), so a faster one may exist"
    lines = [
        f"{first.config} on {first.nodes} x {first.hardware}: {ranks}, {first.numel:,} parameters, {first.precision}"
        f"{samples}",
        f"{searched}; {ended}",
        *([f"set by you: {_settings(choice.given)}"] if choice.given else []),
        *([f"looked at now: {first.looked_at}"] if first.looked_at else []),
        *first.assumed,
        "",
    ]
    # Columns of a pipeline, of halves and of slices are empty words without one.
    staged = any(each.values[Axis.STAGE.setting] > 1 for each in choice.ranked)
    used = {
        **dict.fromkeys(OF_PIPELINE, staged),
        OVERLAP: any(each.prediction.in_halves for each in choice.ranked),
        SLICES: any(each.values[SLICES] != 1 for each in choice.ranked),
    }
    shown = [name for name in choice.varied if used.get(name, True)]
    rows = [_cells(number, each, shown) for number, each in enumerate(choice.ranked, 1)]
    header = {name: name for row in rows for name in row}
    widths = {name: max(len(row.get(name, "")) for row in (header, *rows)) for name in header}
    for row, each in zip((header, *rows), (None, *choice.ranked), strict=True):
        lines.append("  ".join(f"{row.get(name, ''):>{widths[name]}}" for name in header).rstrip())
        if each is not None:
            lines.append(f"{'':>{widths['']}}  {each.why}")
    lines += ["", *choice.next_wins]
    if any(each.values[Axis.CONTEXT.setting] > 1 for each in choice.ranked):
        lines.append(
            "exchanges of context parallelism are timed at the rate of tensor parallelism's, which alone is measured"
        )
    lines += [f"not possible: {division}: {reason}" for division, reason in choice.refused.items()]
    lines += [f"no pipeline stages: {choice.no_stages}"] if choice.no_stages else []
    lines.append(f"to train as 1: {_to_train(choice)}")
    return "\n".join(lines)


def _cells(number: int, ranked: Ranked, varied: Sequence[str]) -> dict[str, str]:
    """The cells of a run's row, by column."""
    found = ranked.prediction
    cells = {"": str(number), "data": str(found.mesh.sizes[Axis.DATA])}
    cells |= {
        name.removesuffix(_SIZE).removeprefix("offload_").removeprefix("pipeline_").rpartition(".")[2]: str(value)
        for name, value in ranked.values.items()
        if name in varied and name != ACCUMULATE
    }
    cells["batch"] = f"{found.batch_size}" + f" x {found.accumulate}" * (found.accumulate > 1)
    cells["s a step"] = f"{found.seconds:.4g}"
    if found.tokens_per_s is None:
        cells["samples/s"] = f"{found.samples_per_s:.4g}"
    else:
        cells["tokens/s"] = f"{found.tokens_per_s:,.0f}"
    return cells | {name: format_bytes(tier.taken_bytes) for name, tier in found.tiers.items() if tier.taken_bytes}


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _to_train(choice: Choice) -> str:
    """The settings of the fastest run, and what else is not as in the config."""
    found = choice.ranked[0].prediction
    said = [f"--trainer.strategy.{name}={value}" for name, value in choice.changes.items()]
    said.append(f"a batch of {found.batch_size} a rank")
    if choice.samples is not None:
        said.append(f"--trainer.{ACCUMULATE}={found.accumulate}")
    return ", ".join(said)
