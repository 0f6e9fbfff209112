"""Result of `lightning-ptm plan` for one run: as data, as text (a sentence and tables) and as JSON, of the same numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_ptm.config import format_bytes
from lightning_ptm.forecasting.pipeline import PipelineForecast
from lightning_ptm.forecasting.rates import LinkUse, Timing
from lightning_ptm.memory.endurance import MONTH_S, DiskLife, duration, written_in_words
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.planning.plan import Plan
from lightning_ptm.runtime.engine.inspection import OptimizerBytes
from lightning_ptm.terms import Link

LARGEST_BATCH = 1 << 20
"""Most samples of a rank that are considered."""
_NOTHING_S = 1e-9
_OF_A_PASS = (Link.DISK_READ, Link.DISK_WRITE, Link.UPDATE_HOST)
"""Links of lock-free updates, which may serve several steps."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Forecast bytes in one tier of one rank.

    Attributes:
        page_bytes: bytes of pages in use at the peak.
        reserved_bytes: bytes of all pages that the run reserves at its start. Page-locked and device memory is allocated
            then; other RAM only as pages are used.
        gradient_bytes: peak bytes of gradients that wait in `.grad`, outside of pages.
        activation_bytes: bytes of activations at the peak, outside of pages.
        have_bytes: bytes that the tier has.
        taken_bytes: bytes that the run takes at most: of pages those that are allocated.
    """

    page_bytes: int
    reserved_bytes: int
    gradient_bytes: int
    activation_bytes: int
    have_bytes: int
    taken_bytes: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes that a run takes of one rank's share of a disk, and the rates of the whole disk."""

    bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """Changes with which a run would fit, or with which its disk would last.

    Attributes:
        changes: settings of the strategy, `staging_memory` (Tuning's), `accumulate_grad_batches` (the Trainer's),
            `batch_size` (samples per rank) and `lora_rank` (everything is frozen, and adapters of this rank are trained),
            with their values.
        seconds: seconds of an optimizer step with them.
        samples_per_s: samples per second of all ranks.
        disk: the disk that a changed `disk_path` is on; None: it stays as it is.
        disk_lasts_s: see `Prediction`.
    """

    changes: dict[str, Any]
    seconds: float
    samples_per_s: float
    disk: DiskUse | None = None
    disk_lasts_s: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """Forecast for one run; bytes are those of one rank. As text: the answer in a sentence, then tables.

    Attributes:
        config, hardware: names of the config (or of the model's class) and of the hardware file.
        device: the device type of the hardware, such as `cuda`.
        precision: the Trainer's.
        nodes: number of nodes.
        mesh: axes of all ranks.
        numel: parameters of the model.
        fits: whether pages and activations fit their tiers.
        reason: what does not fit, in a sentence.
        homes: for parameters, gradients and master states, bytes by home tier. Gradients that are updated during the backward
            have no home.
        tiers: peak bytes by tier; like homes, pages and all of timing empty if states fit in no placement.
        pages: by tier, bytes of the pages that are reserved at the start, by use.
        optimizers: bytes of each optimizer's states on a rank.
        batch_size: samples per rank and micro-batch.
        tokens: tokens of such a batch; None if it is not of tokens.
        accumulate: micro-batches in a step.
        flops: operations of a step.
        matrix_flops_per_s: the hardware file's rate for the dtype.
        timing: timing of an optimizer step; None if the run does not fit.
        seconds: seconds of an optimizer step: those of `timing`, or more in lock-free mode with updates slower than compute;
            None if the run does not fit.
        in_halves: whether batches are computed in two halves (`TensorParallel.overlap`).
        other_overlap_s: seconds of a step with the other value of `TensorParallel.overlap`; None where it is not possible.
        lock_free_s, copies_s: see `StepTime`.
        launch_s: of the seconds of compute, those of units that launch kernels for longer than these compute.
        stages_wait_s: seconds of a step in which a pipeline's busiest stage waits for other stages.
        pipeline: the stages; None: there is no pipeline. With it, bytes are of the stage that takes most of the device, and
            `timing` is of the busiest one.
        binds: the bottleneck of the step, in words.
        steps_per_pass: optimizer steps that one lock-free pass over the master states can serve (`max_staleness`); None:
            updates are synchronous.
        chosen: values that were searched for: an argument of the model, device_memory in bytes.
        plan: the plan of one micro-batch.
        page_ticks: bytes of device pages at each tick and after the last, including ticks of units that are in no plan.
        activation_ticks: bytes of activations, likewise.
        disk_written_bytes: bytes that a rank writes to each folder of the disk tier in a step, in whole disk blocks; the
            most, with lock-free updates; empty: none.
        disk_life: how long the disk lasts that wears out first; None: nothing is written to a disk.
        offloaded_bytes: activations of a micro-batch that are offloaded (`offload_activations`).
        offloaded_to: where they are until the backward, in words.
        handlings: by unit, what becomes of its activations, in words; empty where all are kept, or settings say it for all.
        may_choose: whether the run may recompute or offload activations that do not fit.
        largest_batch: the largest batch that fits, in samples per rank, with all activations kept if those of this batch are;
            0: not even one sample fits; None: the model takes only batches of this size.
        assumed: what the answer assumes of the run, in words.
        proposals: what would fit if this does not, or with what the disk would last as long as `endurance_s`, nearest first;
            if nothing that was tried does the latter, the one with which it lasts longest.
        endurance_s: seconds of training that the disk has to last; None: any.
        looked_at: free memory of this machine at the time of the plan, in words; empty for another machine.
        deepens: the argument of the config's model that makes it deeper but not wider; empty: unknown; None: no config.
    """

    config: str
    hardware: str
    device: str
    precision: str
    nodes: int
    mesh: Mesh
    numel: int
    fits: bool
    reason: str
    batch_size: int
    accumulate: int
    matrix_flops_per_s: float
    homes: dict[str, dict[str, int]] = field(default_factory=dict)
    tiers: dict[str, TierPlan] = field(default_factory=dict)
    pages: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: int | None = None
    flops: int = 0
    timing: Timing | None = None
    seconds: float | None = None
    in_halves: bool = False
    other_overlap_s: float | None = None
    lock_free_s: float = 0.0
    copies_s: float = 0.0
    launch_s: float = 0.0
    stages_wait_s: float = 0.0
    pipeline: PipelineForecast | None = None
    binds: str = ""
    chosen: dict[str, int] = field(default_factory=dict)
    plan: Plan | None = None
    page_ticks: tuple[int, ...] = ()
    activation_ticks: tuple[int, ...] = ()
    optimizers: tuple[OptimizerBytes, ...] = ()
    disk_written_bytes: tuple[int, ...] = ()
    disk_life: DiskLife | None = None
    offloaded_bytes: int = 0
    offloaded_to: str = ""
    handlings: Mapping[str, str] = field(default_factory=dict)
    may_choose: bool = False
    largest_batch: int | None = None
    deepens: str | None = None
    looked_at: str = ""
    steps_per_pass: int | None = None
    assumed: tuple[str, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    endurance_s: float | None = None

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `lightning-ptm plan --json`: seconds, bytes and counts as numbers."""
        return as_dict(self)

    @property
    def waits_s(self) -> float:
        """Seconds of a step in which compute waits: the sum of all waits that the text lists."""
        if self.timing is None:
            return 0.0
        stalls_s = sum(stall.seconds for stall in self.timing.stalls)
        return stalls_s + self.timing.rounds_s + self.lock_free_s + self.copies_s + self.stages_wait_s

    @property
    def other_s(self) -> float:
        """Seconds of a step beside compute and waits: work of the CPU, such as updates on cores that compute."""
        if self.timing is None or self.seconds is None:
            return 0.0
        return max(0.0, self.seconds - self.timing.compute_s - self.waits_s)

    @property
    def flops_per_s(self) -> float:
        """The model's operations per second on one rank, without recomputation; 0 if it does not fit."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.mesh.world_size

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks; 0 if it does not fit."""
        return len(self.mesh.replicas) * self.batch_size * self.accumulate / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks; None if batches are not of tokens."""
        return None if self.tokens is None else self.samples_per_s * self.tokens / self.batch_size

    @property
    def disk_written_bytes_per_token(self) -> float | None:
        """Bytes that all ranks write to disk for a token of a batch; None if batches are not of tokens."""
        tokens = self.tokens_per_step
        return None if tokens is None else sum(self.disk_written_bytes) / tokens

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step for each rank; None if batches are not of tokens."""
        return None if self.tokens is None else self.tokens * self.accumulate / len(self.mesh.replicas[0])

    @property
    def wears_out(self) -> bool:
        """Whether the disk lasts less than `endurance_s`."""
        lasts_s = self.disk_lasts_s
        return self.endurance_s is not None and lasts_s is not None and lasts_s < self.endurance_s

    @property
    def disk_lasts_s(self) -> float | None:
        """Seconds of training after which a new disk has reached its rating; None: nothing is written, or it does not fit."""
        return self.disk_life.seconds(self.seconds) if self.disk_life is not None and self.seconds else None


def as_dict(found: Prediction) -> dict[str, Any]:
    """Seconds, bytes and counts as numbers."""
    timing = found.timing
    return {
        "config": found.config,
        "hardware": found.hardware,
        "precision": found.precision,
        "assumed": list(found.assumed),
        "looked_at": found.looked_at,
        "nodes": found.nodes,
        "ranks": found.ranks,
        "context_parallel_size": found.mesh.sizes[Axis.CONTEXT],
        "tensor_parallel_size": found.mesh.sizes[Axis.TENSOR],
        "pipeline": None if found.pipeline is None else dataclasses.asdict(found.pipeline),
        "parameters": found.numel,
        "fits": found.fits,
        "reason": found.reason,
        "endurance_s": found.endurance_s,
        "proposals": [dataclasses.asdict(each) for each in found.proposals],
        "binds": found.binds,
        "chosen": found.chosen,
        "batch_size_per_rank": found.batch_size,
        "largest_batch_size_per_rank": found.largest_batch,
        "accumulate": found.accumulate,
        "homes_bytes_per_rank": found.homes,
        "offloaded_bytes_per_micro_batch": found.offloaded_bytes,
        "pages_bytes_per_rank": found.pages,
        "optimizers": [dataclasses.asdict(each) for each in found.optimizers],
        "tiers_bytes_per_rank": {name: dataclasses.asdict(tier) for name, tier in found.tiers.items()},
        "seconds_per_step": found.seconds,
        "in_halves": found.in_halves,
        "seconds_with_other_overlap": found.other_overlap_s,
        "waits_s": None if timing is None else found.waits_s,
        "other_s": None if timing is None else found.other_s,
        "stages_wait_s": None if timing is None else found.stages_wait_s,
        "launch_s": None if timing is None else found.launch_s,
        "compute_s": None if timing is None else timing.compute_s,
        "links": {}
        if timing is None
        else {
            use.link.value: {"bytes": use.bytes, "busy_s": use.busy_s, "collectives": use.collectives}
            for use in timing.links
        },
        "disk_written_bytes_per_step_and_rank": list(found.disk_written_bytes),
        "disk_written_bytes_per_token": found.disk_written_bytes_per_token,
        "disk_rated_bytes": None if found.disk_life is None else found.disk_life.rated_bytes,
        "disk_lasts_steps": None if found.disk_life is None else found.disk_life.steps,
        "disk_lasts_s": found.disk_lasts_s,
        "rounds": {} if timing is None else {"count": timing.rounds, "seconds": timing.rounds_s},
        "stalls_s": {} if timing is None else {stall.cause.value: stall.seconds for stall in timing.stalls},
        "lock_free_waits_s": None if timing is None else found.lock_free_s,
        "activation_copies_waits_s": None if timing is None else found.copies_s,
        "samples_per_s": found.samples_per_s if found.fits else None,
        "tokens_per_s": found.tokens_per_s if found.fits else None,
        "model_flops_per_step_and_rank": found.flops,
        "model_flops_per_s_and_rank": found.flops_per_s if found.fits else None,
        "share_of_matrix_rate": found.flops_per_s / found.matrix_flops_per_s if found.fits else None,
        "matrix_flops_per_s_and_rank": found.matrix_flops_per_s,
    }


def answer(found: Prediction) -> str:
    """One sentence: whether the run fits, what it takes of each tier, the seconds of a step, and how long the disk lasts, if
    less than a month."""
    if not found.fits:
        return f"does not fit: {found.reason}"
    parts = [_taken(tier, _PLACES.get(name, name), found) for name, tier in found.tiers.items() if tier.taken_bytes]
    waits = (
        f", of which compute waits {found.waits_s:.4g} s for {_waited_for(found)}" if found.waits_s > _NOTHING_S else ""
    )
    lasts_s = found.disk_lasts_s
    short = lasts_s is not None and lasts_s < MONTH_S
    lasts = (
        f"; the disk lasts {duration(lasts_s)} of training"
        if lasts_s is not None and (short or found.wears_out)
        else ""
    )
    if found.wears_out and found.endurance_s is not None:
        lasts += f", and not {duration(found.endurance_s)}"
    return f"fits: {', '.join(parts)}; {found.seconds:.4g} s a step{waits}{lasts}"


_PLACES = {"host": "RAM", "disk": "on disk"}
_DEVICES = {"cpu": "RAM", "cuda": "on the GPU"}


def _taken(tier: TierPlan, place: str, found: Prediction) -> str:
    if place == "device":
        place = _DEVICES.get(found.device, "on the device")
    taken, have = format_bytes(tier.taken_bytes), format_bytes(tier.have_bytes)
    if not tier.have_bytes or place == "on disk":
        return f"{taken} {place}"
    number, _, unit = taken.partition(" ")
    return f"{number if have.endswith(f' {unit}') else taken} of {have} {place}"


def _waited_for(found: Prediction) -> str:
    """The resource that is busiest while nothing computes, in words."""
    assert found.timing is not None
    if found.stages_wait_s > found.waits_s / 2:
        return "other stages"
    busiest = max(found.timing.links, key=lambda use: use.busy_s)
    return _RESOURCES.get(busiest.link, busiest.link.value.replace("_", " "))


_RESOURCES = {
    Link.DISK_READ: "the disk",
    Link.DISK_WRITE: "the disk",
    Link.HOST_TO_DEVICE: "copies to the device",
    Link.DEVICE_TO_HOST: "copies from the device",
    Link.UPDATE_HOST: "updates in RAM",
    Link.UPDATE_DEVICE: "updates",
    Link.COLLECTIVE: "other ranks",
    Link.EXCHANGE: "other ranks",
    Link.TENSOR_EXCHANGE: "other ranks",
}


def _proposed(found: Prediction, options: bool) -> list[str]:
    if not found.fits and not found.proposals:
        return [
            "nothing that was tried would fit: other sizes of memory, recompute, smaller batches or states, a disk, LoRA"
        ]
    if not found.fits:
        return [f"would fit with {_changes(each, options)}: {_cost(each)}{_disk_use(each)}" for each in found.proposals]
    now = f"(now {found.seconds:.4g} s, {found.samples_per_s:.4g} samples/s)"
    lines = [f"{_lasting(each, found)} with {_changes(each, options)}: {_cost(each)} {now}" for each in found.proposals]
    if found.wears_out and not lines:
        lines = ["nothing that was tried lasts longer; give more RAM, a disk with a higher disk_tbw, or several disks"]
    return lines


def _cost(proposal: Proposal) -> str:
    return f"{proposal.seconds:.4g} s a step, {proposal.samples_per_s:.4g} samples/s"


def _lasting(proposal: Proposal, found: Prediction) -> str:
    """Returns the text on how long the disk lasts with a proposal."""
    lasts_s, wanted_s = proposal.disk_lasts_s, found.endurance_s
    if lasts_s is None:
        return "would write nothing to disk"
    longest = "nothing that was tried lasts as long; " if wanted_s is not None and lasts_s < 0.999 * wanted_s else ""
    return f"{longest}would last {duration(lasts_s)}"


def _disk_use(proposal: Proposal) -> str:
    if (disk := proposal.disk) is None:
        return ""
    rates = f"reads {disk.read_bytes_per_s / 1e9:.3g} and writes {disk.write_bytes_per_s / 1e9:.3g} GB/s"
    return f", {format_bytes(disk.bytes)} a rank on a disk that {rates}"


def _changes(proposal: Proposal, options: bool) -> str:
    """The changes as one would write them, and what is not a setting in words."""
    changes = dict(proposal.changes)
    rank = changes.pop("lora_rank", None)
    micro_batches = changes.pop("accumulate_grad_batches", None)
    if options:
        names = {"batch_size": "batch-size", "staging_memory": "strategy.tuning.staging_memory"}
        settings = [f"--{names.get(name, f'strategy.{name}')}={value}" for name, value in changes.items()]
        written = [" ".join(settings)] if settings else []
    else:
        words = {"batch_size": "a batch of {} a rank", "staging_memory": "tuning=Tuning(staging_memory={!r})"}
        written = [words.get(name, f"{name}={{!r}}").format(value) for name, value in changes.items()]
    if micro_batches is not None:
        written.append(f"accumulate_grad_batches={micro_batches}" + " of the Trainer" * options)
    return " and ".join([f"LoRA of rank {rank}"] * (rank is not None) + written)


def render(found: Prediction, *, options: bool = False) -> str:
    """The text that `plan` prints: the answer in a sentence, then tables.

    Args:
        options: write proposals as options of the command, not as arguments of `lightning_ptm.plan`.
    """
    lines = [
        answer(found),
        f"{found.config} on {found.nodes} x {found.hardware}: {_count(found.ranks, 'rank')}, {found.numel:,} parameters, "
        f"{found.precision}",
        *([f"looked at now: {found.looked_at}"] if found.looked_at else []),
        *found.assumed,
        *_proposed(found, options),
    ]
    if not found.tiers:
        return "\n".join(lines)
    lines += [
        _largest_batch(found),
        *(
            f"device_memory: {size} ({format_bytes(size)})" if name == "device_memory" else f"largest {name}: {size}"
            for name, size in found.chosen.items()
        ),
        *_largest_model(found),
        "",
        f"{'of one rank':<12}{'pages in use':>13}{'all pages':>12}{'gradients':>12}{'activations':>13}{'available':>12}",
    ]
    for name, tier in found.tiers.items():
        cells = [tier.page_bytes, tier.reserved_bytes, tier.gradient_bytes, tier.activation_bytes, tier.have_bytes]
        widths = (13, 12, 12, 13, 12)
        row = "".join(
            f"{format_bytes(size) if size else '-':>{width}}" for size, width in zip(cells, widths, strict=True)
        )
        lines.append(f"{name:<12}{row}")
    lines += ["", f"{'stored in':<12}" + "".join(f"{name:>12}" for name in found.tiers)]
    for kind, tiers in found.homes.items():
        lines.append(f"{kind:<12}" + "".join(f"{format_bytes(size) if size else '-':>12}" for size in tiers.values()))
    lines += ["", f"{'pages by use':<24}" + "".join(f"{name:>12}" for name in found.pages)]
    for purpose in dict.fromkeys(each for there in found.pages.values() for each in there):
        sizes = [there.get(purpose, 0) for there in found.pages.values()]
        lines.append(f"{purpose:<24}" + "".join(f"{format_bytes(size) if size else '-':>12}" for size in sizes))
    if found.optimizers:
        lines += ["", f"{'optimizer':<40}{'updates':<20}{'states':>12}"]
        lines += [f"{each.optimizer:<40}{each.kind:<20}{format_bytes(each.bytes):>12}" for each in found.optimizers]
    if found.pipeline is not None:
        lines += ["", *_stages(found.pipeline)]
    if found.timing is None:
        return "\n".join(lines)
    timing = found.timing
    lines += ["", f"a step: {found.seconds:.4g} s", f"  compute {timing.compute_s:.4g} s{_launching(found)}"]
    for use in timing.links:
        if use.bytes:
            name = use.link.value.replace("_", " ")
            how = f" in {_count(use.collectives, 'collective')}" if use.collectives else ""
            lines.append(f"  {name} {use.busy_s:.4g} s for {format_bytes(use.bytes)}{how}{_when(use, found, timing)}")
    lines += [f"  {line}" for line in _halves(found)]
    if timing.rounds:
        messages = _count(timing.rounds, "control message")
        lines.append(f"  {messages} among ranks {timing.rounds_s:.4g} s, while nothing computes")
    if found.disk_written_bytes:
        lines.append(f"  {_written(found)}")
    if found.offloaded_bytes:
        size = format_bytes(found.offloaded_bytes)
        lines.append(f"  activations kept {found.offloaded_to} until the backward: {size} a micro-batch, each way")
    lines += [f"  {line}" for line in _handlings(found)]
    for stall in timing.stalls:
        if stall.seconds > _NOTHING_S:
            lines.append(f"  compute waits {stall.seconds:.4g} s for {stall.cause.value}")
    if found.steps_per_pass is not None and found.lock_free_s > _NOTHING_S:
        lines.append(
            f"  compute waits {found.lock_free_s:.4g} s for lock-free updates: a pass over the states serves up to "
            f"{_count(found.steps_per_pass, 'step')} (max_staleness of lock_free=LockFree(...))"
        )
    if found.stages_wait_s > _NOTHING_S:
        lines.append(f"  compute waits {found.stages_wait_s:.4g} s for other stages")
    if found.copies_s > _NOTHING_S:
        lines.append(f"  compute waits {found.copies_s:.4g} s for copies of activations away and back")
    if found.other_s > _NOTHING_S:
        lines.append(f"  other work of the CPU {found.other_s:.4g} s, in addition")
    together = len(found.mesh.replicas[0])
    whose = "a rank" if together == 1 else f"a group of {together} ranks"
    per_step = f"{_count(found.batch_size, 'sample')} {whose}" + (
        f", {found.accumulate} times" if found.accumulate > 1 else ""
    )
    tokens = "" if found.tokens_per_s is None else f", {found.tokens_per_s:,.0f} tokens/s"
    lines += [f"bottleneck: {found.binds}", f"{per_step}: {found.samples_per_s:.4g} samples/s{tokens}"]
    if found.seconds:
        share = found.flops_per_s / found.matrix_flops_per_s
        lines.append(f"model operations: {_operations(found.flops_per_s)} a rank, {share:.0%} of the peak matrix rate")
    return "\n".join(lines)


def _stages(pipeline: PipelineForecast) -> list[str]:
    """The bytes and seconds of each stage, and how long stages wait for each other."""
    names = ("pages", "activations", "forward", "backward", "computes", "waits", "sends")
    first = max(10, *(len(_blocks(stage.blocks)) for stage in pipeline.stages))
    lines = [f"{'stage':<7}{'units':<{first}}{'graphs':>8}" + "".join(f"{name:>13}" for name in names)]
    for number, stage in enumerate(pipeline.stages):
        sizes = "".join(f"{format_bytes(size):>13}" for size in (stage.page_bytes, stage.activation_bytes))
        seconds = (stage.forward_s, stage.backward_s, stage.busy_s, stage.idle_s, stage.send_s)
        times = "".join(f"{f'{each_s:.4g} s':>13}" for each_s in seconds) if stage.busy_s else ""
        lines.append(f"{number:<7}{_blocks(stage.blocks):<{first}}{stage.graphs:>8}{sizes}{times}")
    if any(stage.busy_s for stage in pipeline.stages):
        lines.append(
            f"{pipeline.schedule} with {pipeline.micro_batches} micro-batches: stages wait for each other "
            f"{pipeline.bubble:.1%} of their time; their sends take {pipeline.hidden_s + pipeline.exposed_s:.4g} s in all, "
            f"{pipeline.exposed_s:.4g} s of it while the receiver has nothing else to do"
        )
    if pipeline.faster_blocks:
        lines.append(f"pipeline_blocks={list(pipeline.faster_blocks)} divides blocks by their planned seconds")
    return lines


def _blocks(blocks: tuple[str, str, int]) -> str:
    first, last, count = blocks
    return first if count == 1 else f"{first} to {last} ({count})"


def _halves(found: Prediction) -> list[str]:
    """Says whether two halves of a batch pay."""
    if found.other_overlap_s is None or not found.seconds:
        return []
    if found.in_halves:
        pays = "pays" if found.seconds < found.other_overlap_s else "does not pay"
        return [f"TensorParallel(overlap='two_batches') {pays}: {found.other_overlap_s:.4g} s a step without"]
    pays = "would pay" if found.other_overlap_s < found.seconds else "would not pay"
    return [f"TensorParallel(overlap='two_batches') {pays}: {found.other_overlap_s:.4g} s a step"]


def _handlings(found: Prediction) -> list[str]:
    """Returns the text on the handling of each unit's activations, in runs of units, with the reason."""
    if not found.handlings:
        return []
    device = found.tiers["device"]
    lines = [
        f"activations by unit, the fastest choice whose peak ({format_bytes(device.activation_bytes)} on the device) fits:"
    ]
    for handling, run in itertools.groupby(found.handlings.items(), key=lambda pair: pair[1]):
        names = [name for name, _ in run]
        whose = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} units)"
        lines.append(f"  {whose}: {handling}")
    return lines


def _written(found: Prediction) -> str:
    """The bytes that a rank writes to disk in a step, by folder and by token."""
    sizes = [format_bytes(size) for size in found.disk_written_bytes]
    folders = f" ({', '.join(sizes)} to the folders of disk_path)" if len(sizes) > 1 else ""
    most = "at most " if found.steps_per_pass is not None else ""
    line = f"written to disk: {most}{written_in_words(sum(found.disk_written_bytes), found.tokens_per_step)}{folders}"
    life, lasts_s = found.disk_life, found.disk_lasts_s
    if life is None or lasts_s is None:
        return line
    return f"{line}; {life.rating} last {life.steps:,} steps, {duration(lasts_s)}"


def _when(use: LinkUse, found: Prediction, timing: Timing) -> str:
    """Returns what does not overlap with compute: exchanges, and the part that exceeds all of compute."""
    if use.link is Link.TENSOR_EXCHANGE and found.in_halves:
        return ", of each half of a batch while the other one computes"
    if use.link in (Link.EXCHANGE, Link.TENSOR_EXCHANGE):
        return ", while nothing computes"
    if found.steps_per_pass is not None and use.link in _OF_A_PASS:
        return " in each pass over the states"
    alone = use.busy_s - timing.compute_s
    return f", at least {alone:.4g} s of it while nothing computes" if alone > _NOTHING_S else ""


def _launching(found: Prediction) -> str:
    """Says that kernels are launched for longer than they compute, where that takes most of the time."""
    assert found.timing is not None
    if found.launch_s <= found.timing.compute_s / 2:
        return ""
    return f", of which {found.launch_s:.4g} s in units whose kernels are launched for longer than they compute"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _largest_batch(found: Prediction) -> str:
    largest = found.largest_batch
    if largest is None:
        return "largest batch that fits: not known, for the model computes no batch of another size"
    if not largest:
        return "largest batch that fits: none, not even 1 sample a rank"
    more = " or more" if largest >= LARGEST_BATCH else ""
    how = "" if found.batch_size == largest or found.handlings else " (--batch-size auto plans it)"
    kept = " with all activations kept" if found.may_choose and not found.handlings else ""
    return f"largest batch that fits{kept}: {_count(largest, 'sample')} a rank{more}{how}"


def _largest_model(found: Prediction) -> list[str]:
    """Returns how to search the largest model; not done by default, since plans of a dozen models take longer than all
    else."""
    if found.deepens is None or found.deepens in found.chosen:
        return []
    name = found.deepens or "NAME (an argument of the model)"
    return [f"largest model of this width that fits: --largest {name} finds it"]


def _operations(per_s: float) -> str:
    """A rate such as `110 TFLOP/s`."""
    prefix, unit = ("T", 1e12) if per_s >= 1e12 else ("G", 1e9)
    return f"{per_s / unit:.3g} {prefix}FLOP/s"
