"""`lightning-ptm plan gpt3_175b --hardware a100_40gb_x8 --nodes 32`: whether a run would fit on machines that are not here,
what would live where, and how long a step would take.

Decides with what a run decides with: the request of the strategy, `decide`, `make_plan`. Adds seconds to the ticks of the
plan's trace (estimate.py) and replays it (planning/timing.py: steady). Allocates no parameter.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_ptm.commands import hardware as machines
from lightning_ptm.commands.estimate import (
    Work,
    activation_bytes,
    estimate,
    example_batch,
    forwards,
    host_activation_bytes,
    resized,
    sample_count,
    token_count,
)
from lightning_ptm.commands.params import build_on_meta, read_config
from lightning_ptm.commands.picture import draw_plan
from lightning_ptm.commands.search import largest_value, with_argument
from lightning_ptm.commands.timeline import write_timeline
from lightning_ptm.config import DEFAULT_PAGE_BYTES, Settings, format_bytes, parse_bytes
from lightning_ptm.drawing import check_target, save
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.timing import Activity, Hardware, Link, Timing, steady
from lightning_ptm.planning.trace import Trace
from lightning_ptm.precision import AngelPTMPrecision
from lightning_ptm.runtime.blueprint import Blueprint, LockFree, Request, decide
from lightning_ptm.runtime.executor import Mode
from lightning_ptm.runtime.occupied import Occupied, occupied
from lightning_ptm.runtime.planner import make_plan
from lightning_ptm.runtime.recompute import recomputed_units
from lightning_ptm.strategy import AngelPTMStrategy
from lightning_ptm.terms import Kind, Phase, Tier

_ANY_STEPS = 1000
"""Where a config does not say how many steps it takes; only the schedule of the learning rate asks."""
_LARGEST_BATCH = 1 << 20
_DEVICE_SHARES = 16
"""`device_memory` is looked for among so many equal parts of a device's memory."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of one rank.

    Attributes:
        page_bytes: of pages in use at the peak.
        reserved_bytes: of all pages that the run asks for at its start. Page-locked and device memory is then taken; other
            RAM only as pages are used.
        gradient_bytes: the most that gradients take which wait in `.grad`, beside the pages.
        activation_bytes: at the peak, beside both.
        have_bytes: what there is.
    """

    page_bytes: int
    reserved_bytes: int
    gradient_bytes: int
    activation_bytes: int
    have_bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What `plan` found for one run; bytes are of one rank.

    Attributes:
        fits: pages and activations fit their tiers; reason: what does not.
        homes: for parameters, gradients and master states, bytes of each tier. Gradients that pass through the backward
            have none.
        tiers: what is in them at the worst moment.
        batch_size: samples a rank and micro-batch; tokens: of it, where the batch is of tokens.
        timing: of an optimizer step; None where it does not fit.
        seconds: of an optimizer step: the timing's, or more in lock-free mode where updates are slower than compute.
        binds: what the step waits for most.
        chosen: what was searched for: an argument of the model, device_memory in bytes.
        plan: of one micro-batch; activation_ticks: bytes of activations at each of its ticks.
        offloaded_bytes: activations of a micro-batch that go to RAM and back (`activations="host"`).
    """

    config: str
    hardware: str
    nodes: int
    ranks: int
    numel: int
    fits: bool
    reason: str
    homes: dict[str, dict[str, int]]
    tiers: dict[str, TierPlan]
    batch_size: int
    tokens: int | None
    accumulate: int
    flops: int
    timing: Timing | None
    seconds: float
    binds: str
    chosen: dict[str, int]
    plan: Plan
    activation_ticks: tuple[int, ...]
    offloaded_bytes: int = 0

    @property
    def samples_per_s(self) -> float:
        return self.ranks * self.batch_size * self.accumulate / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None else self.samples_per_s * self.tokens / self.batch_size


def plan(
    config_file: str,
    hardware: str | None = None,
    nodes: int = 1,
    batch_size: str | int | None = None,
    strategy: dict[str, Any] | None = None,
    device_memory: str | None = None,
    largest: str | None = None,
    json: bool = False,
    timeline: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Tells whether a config fits on machines that you do not have, and how fast a step would be.

    Ends with status 1 where it does not fit. Operations and activations are estimated from a forward without memory; see
    lightning_ptm/commands/estimate.py for what is counted. Callbacks of the config are not asked whether they read
    gradients.

    Args:
        config_file: a config file of `fit`; a bare name is looked up among the installed ones.
        hardware: a hardware file, or the name of one in configs/hardware/.
        nodes: machines of this kind.
        batch_size: samples a rank; `auto` finds the largest that fits; by default the config's.
        strategy: settings of the strategy in place of the config's, such as '{disk_path: /any, lock_free: true}'.
        device_memory: the strategy's setting, or found among sixteenths of a device's memory: `best` for the most
            samples/s, `least` for the most room for activations.
        largest: an argument of the config's model, such as `layers`: finds its largest value that fits.
        json: print numbers for machines instead.
        timeline: a file for the simulated step, which chrome://tracing and ui.perfetto.dev show.
        plot: a PNG file for a picture: memory of each tier over ticks, what was busy over the step.
    """
    if hardware is None:
        raise ConfigError(f"plan needs --hardware: a hardware file, or one of {', '.join(machines.installed())}")
    if plot is not None:
        check_target(plot, "plot")
    record: list[Activity] | None = [] if timeline is not None or plot is not None else None
    # A hundred thousand modules and tasks live to the end; looking for cycles among them takes a third of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        found, drawn = forecast(
            config_file,
            hardware,
            nodes,
            batch_size,
            strategy or {},
            record,
            device_memory=device_memory,
            largest=largest,
        )
    finally:
        if collects:
            gc.enable()
    print(as_json(found) if json else render(found))
    if plot is not None:
        save(draw_plan(found, drawn, record or []), plot)
        if not json:
            print(f"picture: {plot}")
    if not found.fits:
        raise CapacityError(found.reason)
    if timeline is not None and record is not None:
        write_timeline(timeline, record, [unit.name or "root" for unit in drawn.units])
        if not json:
            print(f"timeline of a step: {timeline}")


def forecast(
    config_file: str | Path,
    hardware: str,
    nodes: int = 1,
    batch_size: str | int | None = None,
    strategy: Mapping[str, Any] | None = None,
    record: list[Activity] | None = None,
    *,
    device_memory: str | None = None,
    largest: str | None = None,
) -> tuple[Forecast, Blueprint]:
    """What `plan` prints, and the blueprint that it is about; arguments as there, `record` as `steady` takes it.

    Raises:
        ConfigError: config, hardware file or an argument that cannot work.
        CapacityError: model states fit in no placement; says which number decides.
    """
    node = machines.read(machines.find(hardware))
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}, and nothing runs on less than 1 machine; raise it")
    wanted = _wanted_batch(batch_size)
    settings = dict(strategy or {})
    goal = device_memory if device_memory in ("best", "least") else None
    if device_memory is not None and goal is None:
        try:
            settings["device_memory"] = parse_bytes(device_memory, name="device_memory")
        except ConfigError as error:
            raise ConfigError(f"{error}; or say 'best' or 'least'") from error
    if goal is not None and node.device == "cpu":
        raise ConfigError(
            f"device_memory is {goal!r}, and {node.name} is a CPU, whose device tier is RAM; leave it out, or give a size"
        )
    document = read_config(Path(config_file))
    node.rates(nodes)  # what it lacks is found before anything is built
    if largest is None:
        question = _Question(_Run(document, config_file, settings, node), config_file, node, nodes, wanted)
        return question.search(goal, record) if goal is not None else question.answer(record)

    def ask(value: int) -> _Question:
        try:
            run = _Run(with_argument(document, largest, value, config_file), config_file, settings, node)
        except ConfigError as error:
            raise ConfigError(
                f"largest is {largest!r}, and the model cannot have {value}: {error}; name an argument that may be any whole "
                f"number, such as layers"
            ) from error
        return _Question(run, config_file, node, nodes, wanted)

    first = with_argument(document, largest, None, config_file)["model"]["init_args"][largest]
    value = largest_value(first, lambda value: ask(value).fits(search=goal is not None))
    question = ask(max(value, 1))
    found, drawn = question.search(goal, record) if goal is not None else question.answer(record)
    return dataclasses.replace(found, chosen={largest: max(value, 1)} | found.chosen), drawn


class _Question:
    """One config on some nodes: what would become of it with this or that device_memory.

    Args:
        wanted: samples a rank; None: the config's.
    """

    def __init__(
        self, run: _Run, path: str | Path, node: machines.Node, nodes: int, wanted: Literal["auto"] | int | None
    ) -> None:
        # Configuration.
        self._run = run
        self._path = path
        self._node = node
        self._nodes = nodes
        self._wanted = wanted
        # State.
        self._sizes: _Sizes | None = None
        """Made of the first blueprint; units and ticks are those of all."""

    def search(self, goal: str, record: list[Activity] | None = None) -> tuple[Forecast, Blueprint]:
        """The answer for the `best` device_memory or the `least`; where none fits, for the config's."""
        most, chosen = 0.0, None
        for settings, size in self._parts():
            try:
                found, _ = self.answer(None, settings)
            except CapacityError:
                continue
            if found.fits and found.samples_per_s > most:
                most, chosen = found.samples_per_s, (settings, size)
                if goal == "least":
                    break
        if chosen is None:
            return self.answer(record)
        found, drawn = self.answer(record, chosen[0])
        return dataclasses.replace(found, chosen={"device_memory": chosen[1]}), drawn

    def fits(self, *, search: bool) -> bool:
        """Whether it fits, with `search` over parts of the device's memory: then the largest first, most often the one."""
        for settings in [settings for settings, _ in reversed(self._parts())] if search else [None]:
            try:
                if self.answer(None, settings)[0].fits:
                    return True
            except CapacityError:
                continue
        return False

    def answer(self, record: list[Activity] | None, settings: Settings | None = None) -> tuple[Forecast, Blueprint]:
        """What `plan` prints for these settings, by default the config's; see `forecast`."""
        run, node = self._run, self._node
        request = run.request if settings is None else dataclasses.replace(run.request, settings=settings)
        rates = node.rates(self._nodes)
        dtype = str(request.compute).removeprefix("torch.")
        node.flops_per_s(dtype)  # refused before the model is laid out
        if request.settings.expert_parallel_size > 1:
            raise ConfigError(
                f"expert_parallel_size is {request.settings.expert_parallel_size}, and a plan does not know how many "
                f"tokens travel between ranks; plan with expert_parallel_size=1, which takes more memory and other traffic"
            )
        world_size = node.ranks_per_node * self._nodes
        drawn = decide(request, node.machine(), world_size)
        made = make_plan(drawn, Mode.TRAIN, drawn.trace)
        recomputed = recomputed_units(len(drawn.units), request.settings.recompute_every)
        takes = occupied(drawn, made, drawn.trace)
        room = _activation_room(drawn, takes, node)
        host_room = _host_room(drawn, node)
        sizes = self._sizes = self._sizes or _Sizes(run, drawn, recomputed)
        samples = (
            sizes.largest(room, host_room) if self._wanted == "auto" else (self._wanted or sample_count(run.batch))
        )
        ticks, works = sizes.at(max(samples, 1))
        peak, offloaded = max(ticks), sizes.offloaded(works)
        fits = samples > 0 and peak <= room and offloaded <= host_room
        batch = resized(run.batch, max(samples, 1))
        short_tier = Tier.DEVICE if peak > room or offloaded <= host_room else Tier.HOST
        timing, seconds, binds = None, 0.0, f"memory for activations on the {short_tier.name.lower()} tier"
        if fits:
            trace = _timed(drawn.trace, [node.seconds(work, dtype) for work in works], recomputed, node.unit_s or 0.0)
            lock_free = drawn.lock_free
            timing = steady(
                drawn.layout,
                drawn.placement,
                made,
                trace,
                drawn.budget,
                # Lock-free updates have a thread of their own: see _beside_updates.
                rates if lock_free is None else dataclasses.replace(rates, shared_cores=False),
                micro_batches=run.accumulate,
                wait_for_updates=lock_free is None,
                record=record,
            )
            seconds = timing.seconds + (node.step_s or 0.0)
            if lock_free is not None:
                seconds = _beside_updates(seconds, timing, lock_free, node)
            elif node.device == "cpu":
                seconds = max(seconds, _cores_s(timing, node, 1.0))
            binds = _binding(timing)
            if offloaded:
                with_copies = _with_copies(seconds, timing, trace, offloaded, run.accumulate, rates)
                binds = binds if with_copies == seconds else "copies of activations to RAM and back"
                seconds = with_copies
        short = (
            f"activations of {max(samples, 1)} samples a rank take {format_bytes(peak)} beside the pages, and the "
            f"device tier of {node.name} leaves {format_bytes(max(room, 0))} to them; lower the batch size, "
            f"use recompute='all', or lower {'host' if drawn.unified else 'device'}_memory"
        )
        if short_tier is Tier.HOST:
            short = (
                f"activations of {max(samples, 1)} samples a rank take {format_bytes(offloaded)} of RAM "
                f"(activations='host'), and pages leave {format_bytes(max(host_room, 0))} of {node.name}'s to them; lower "
                f"the batch size, use recompute='all', or lower host_memory"
            )
        return (
            Forecast(
                config=Path(self._path).name,
                hardware=node.name,
                nodes=self._nodes,
                ranks=world_size,
                numel=sum(item.parameter.numel() for unit in drawn.units for item in unit.parameters),
                fits=fits,
                reason="" if fits else short,
                homes=_homes(drawn),
                tiers=_tiers(drawn, takes, node, {Tier.DEVICE: peak, Tier.HOST: offloaded}),
                batch_size=samples,
                tokens=token_count(batch),
                accumulate=run.accumulate,
                flops=3 * sum(work.flops for work in works) * run.accumulate,
                timing=timing,
                seconds=seconds,
                binds=binds,
                chosen={},
                plan=made,
                activation_ticks=ticks,
                offloaded_bytes=offloaded,
            ),
            drawn,
        )

    def _parts(self) -> list[tuple[Settings, int]]:
        """Settings by device_memory, smallest first."""
        sizes = [self._node.device_memory * part // _DEVICE_SHARES for part in range(1, _DEVICE_SHARES)]
        settings = self._run.request.settings
        return [(dataclasses.replace(settings, device_memory=size), size) for size in sizes]


class _Run:
    """A config as a run would see it, on the meta device."""

    def __init__(
        self, document: Mapping[str, Any], path: str | Path, changed: Mapping[str, Any], node: machines.Node
    ) -> None:
        trainer = document.get("trainer") or {}
        self.accumulate: int = trainer.get("accumulate_grad_batches") or 1
        self.model = build_on_meta(document, path)
        self.batch = example_batch(_data(document, path))
        self.request: Request = self._request(trainer, changed, node)

    def _request(self, trainer: Mapping[str, Any], changed: Mapping[str, Any], node: machines.Node) -> Request:
        given = trainer.get("strategy")
        settings = dict(given.get("init_args") or {}) if isinstance(given, Mapping) else {}
        strategy = AngelPTMStrategy(**{**settings, **changed})
        logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Lightning would say to a Trainer without loggers
            here = Trainer(
                accelerator="cpu",
                devices=1,
                strategy=strategy,
                max_epochs=-1,  # so that nobody asks the data for its length
                max_steps=trainer["max_steps"] if (trainer.get("max_steps") or -1) > 0 else _ANY_STEPS,
                gradient_clip_val=trainer.get("gradient_clip_val"),
                accumulate_grad_batches=self.accumulate,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        strategy.precision_plugin = AngelPTMPrecision(trainer.get("precision") or "32-true")
        here.state.fn = TrainerFn.FITTING
        self.model.trainer = here
        try:
            strategy._lightning_module = self.model
            strategy.setup_optimizers(here)
            wanted = strategy.settings
            if wanted.page_size == "auto":
                wanted = dataclasses.replace(wanted, page_size=_page_bytes(node, wanted))
            if wanted.disk_path is None and "disk" in (wanted.parameter_home, wanted.wanted_master_home):
                wanted = dataclasses.replace(wanted, disk_path=here.default_root_dir)  # as a run does
            return strategy.request(here, wanted)
        finally:
            self.model._trainer = None


def _page_bytes(node: machines.Node, settings: Settings) -> int:
    """What a run would measure."""
    if node.page_size is not None:
        return node.page_size
    if node.device == "cpu" and not settings.disk_paths:
        return DEFAULT_PAGE_BYTES
    raise ConfigError(
        f"page_size is 'auto', which depends on how fast links are with pages of each size, and {node.source} has no "
        f"page_size; run `lightning-ptm probe` on such a machine, or plan with --strategy '{{page_size: 4MiB}}'"
    )


class _Sizes:
    """Activations by batch size."""

    def __init__(self, run: _Run, drawn: Blueprint, recomputed: frozenset[int]) -> None:
        # Configuration.
        self._run = run
        self._drawn = drawn
        self._recomputed = recomputed
        # State.
        self._known: dict[int, tuple[tuple[int, ...], tuple[Work, ...]]] = {}
        run.model.to(run.request.compute)

    def at(self, samples: int) -> tuple[tuple[int, ...], tuple[Work, ...]]:
        """Bytes of activations at each tick, and what units compute."""
        if samples not in self._known:
            run, drawn = self._run, self._drawn
            works = estimate(run.model, drawn.units, resized(run.batch, samples), run.request.compute)
            to_host = drawn.activations_to_host
            self._known[samples] = activation_bytes(works, self._recomputed, drawn.trace, to_host=to_host), works
        return self._known[samples]

    def offloaded(self, works: Sequence[Work]) -> int:
        """Of what units compute, the bytes that wait in RAM for the backward."""
        return host_activation_bytes(works, self._recomputed) if self._drawn.activations_to_host else 0

    def largest(self, room: int, host_room: int) -> int:
        """The largest batch whose activations fit; 0: not even one sample."""
        on_device = self._largest(room, lambda samples: max(self.at(samples)[0]))
        on_host = self._largest(host_room, lambda samples: self.offloaded(self.at(samples)[1]))
        return min(on_device, on_host)

    @staticmethod
    def _largest(room: int, size_at: Callable[[int], int]) -> int:
        least = size_at(1)
        if least > room:
            return 0
        each = max(1, size_at(2) - least)
        samples = min(_LARGEST_BATCH, 1 + (room - least) // each)
        while size_at(samples) > room:  # what units keep need not grow evenly
            samples = max(1, min(samples - 1, samples * room // size_at(samples)))
        return samples


def _wanted_batch(batch_size: str | int | None) -> Literal["auto"] | int | None:
    if batch_size is None:
        return None
    if batch_size == "auto":
        return "auto"
    try:
        samples = int(batch_size)
    except ValueError:
        samples = 0
    if samples < 1:
        raise ConfigError(f"batch_size is {batch_size!r}; give a number from 1 up, or 'auto' for the largest that fits")
    return samples


def _data(document: Mapping[str, Any], path: str | Path) -> LightningDataModule:
    if not isinstance(document.get("data"), Mapping):
        raise ConfigError(f"{path} names no data, so the shape of a batch is not known; it needs data.class_path")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    try:
        parsed = parser.parse_object({"data": document["data"]})
    except ArgumentError as error:
        raise ConfigError(f"the data of {path} cannot be built: {error}") from error
    instantiate = parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes
    data: LightningDataModule = instantiate(parsed).data
    return data


def _activation_room(drawn: Blueprint, takes: Occupied, node: machines.Node) -> int:
    """Bytes of the device tier that are left to activations: RAM on a CPU, where pages that are not used take none."""
    if node.device == "cpu":
        pages = takes.peak(Tier.DEVICE) + takes.peak(Tier.HOST)
        return node.host_memory // node.ranks_per_node - pages - takes.gradients_beside
    return node.device_memory - drawn.pool_bytes[Tier.DEVICE] - takes.gradients_beside


def _host_room(drawn: Blueprint, node: machines.Node) -> int:
    """Bytes of RAM of one rank that pages leave."""
    return node.host_memory // node.ranks_per_node - drawn.pool_bytes[Tier.HOST]


def _with_copies(
    seconds: float, timing: Timing, trace: Trace, offloaded: int, accumulate: int, rates: Hardware
) -> float:
    """Seconds of a step whose activations go to RAM behind its forward and come back behind its backward.

    Where a pass is shorter than its copies it waits for them; and a link carries pages, too.
    """
    found = seconds
    for link, phase in ((Link.DEVICE_TO_HOST, Phase.FORWARD), (Link.HOST_TO_DEVICE, Phase.BACKWARD)):
        copies_s = offloaded * accumulate / rates.bytes_per_s(link)
        behind_s = accumulate * sum(tick.seconds for tick in trace.ticks if tick.phase is phase)
        found += max(0.0, copies_s - behind_s)
    for use in timing.links:
        if use.link in (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE):
            found = max(found, use.busy_s + offloaded * accumulate / rates.bytes_per_s(use.link))
    return found


def _timed(trace: Trace, forward_s: Sequence[float], recomputed: frozenset[int], unit_s: float) -> Trace:
    return Trace(
        tuple(
            dataclasses.replace(
                tick,
                seconds=unit_s + forward_s[tick.unit] * forwards(tick.phase, recomputed=tick.unit in recomputed),
            )
            for tick in trace.ticks
        )
    )


def _update_core_s(timing: Timing, node: machines.Node) -> float:
    """Time of CPU cores that one pass of updates over the master states takes, its disk transfers included."""
    busy = {use.link: use for use in timing.links}
    arithmetic = busy[Link.UPDATE_HOST].busy_s + busy[Link.UPDATE_DEVICE].busy_s
    disk_core_s = 0.0
    if node.disk_bytes_per_core_s is not None:
        disk_core_s = (busy[Link.DISK_READ].bytes + busy[Link.DISK_WRITE].bytes) / node.disk_bytes_per_core_s
    return node.threads * arithmetic + disk_core_s


def _cores_s(timing: Timing, node: machines.Node, part: float) -> float:
    """What a step takes at least, on a CPU, when its cores are never idle and `part` of a pass of updates goes with it."""
    work_s = node.threads * timing.compute_s + part * _update_core_s(timing, node)
    return work_s / node.cores_per_rank + (node.step_s or 0.0)


def _beside_updates(seconds: float, timing: Timing, lock_free: LockFree, node: machines.Node) -> float:
    """Seconds of a step whose updates go on beside it.

    Gradients of as many steps as may be lacking are applied in one pass over the master states, so a step takes a share of
    a pass at least. On a CPU the passes take their part of the cores.
    """
    a_pass = max(use.busy_s for use in timing.links)
    alone = seconds
    if node.device == "cpu":
        a_pass = max(a_pass, _update_core_s(timing, node) / lock_free.cores)
        for _ in range(20):  # slower steps leave more time to each pass: it settles at once
            seconds = max(alone, _cores_s(timing, node, min(1.0, seconds / a_pass)))
    return max(seconds, a_pass / max(1, lock_free.max_staleness))


def _binding(timing: Timing) -> str:
    busy = {"compute": timing.compute_s} | {use.link.value: use.busy_s for use in timing.links}
    name = max(busy, key=busy.__getitem__)
    return f"{name.replace('_', ' ')}, busy {min(1.0, busy[name] / max(timing.seconds, 1e-12)):.0%} of the step"


def _homes(drawn: Blueprint) -> dict[str, dict[str, int]]:
    found = {
        kind.value: {tier.name.lower(): 0 for tier in Tier} for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.MASTER)
    }
    for flat in drawn.layout.flats:
        homes = drawn.placement.homes[flat.unit]
        found["parameter"][homes.parameter.name.lower()] += flat.shard_bytes
        if flat.trainable:
            gradient = drawn.gradient_home(flat.unit)
            if drawn.placement.keeps_gradients or gradient is not Tier.DEVICE:
                found["gradient"][gradient.name.lower()] += flat.shard_bytes
            master = flat.shard_numel * drawn.master_bytes_per_element[flat.index]
            found["master"][homes.master.name.lower()] += master
    return found


def _tiers(
    drawn: Blueprint, takes: Occupied, node: machines.Node, activations: Mapping[Tier, int]
) -> dict[str, TierPlan]:
    ranks = node.ranks_per_node
    host = node.host_memory // ranks
    have = {
        Tier.DEVICE: host if node.device == "cpu" else node.device_memory,
        Tier.HOST: 0 if drawn.unified else host,
        Tier.DISK: drawn.budget.disk_bytes,
    }
    return {
        tier.name.lower(): TierPlan(
            page_bytes=takes.peak(tier),
            reserved_bytes=drawn.pool_bytes[tier],
            gradient_bytes=takes.gradients_beside if tier is Tier.DEVICE else 0,
            activation_bytes=activations.get(tier, 0),
            have_bytes=have[tier],
        )
        for tier in Tier
    }


def as_json(found: Forecast) -> str:
    """One object; seconds, bytes and counts as numbers."""
    timing = found.timing
    return json.dumps(
        {
            "config": found.config,
            "hardware": found.hardware,
            "nodes": found.nodes,
            "ranks": found.ranks,
            "parameters": found.numel,
            "fits": found.fits,
            "reason": found.reason,
            "binds": found.binds,
            "chosen": found.chosen,
            "batch_size_per_rank": found.batch_size,
            "accumulate": found.accumulate,
            "homes_bytes_per_rank": found.homes,
            "offloaded_bytes_per_micro_batch": found.offloaded_bytes,
            "tiers_bytes_per_rank": {name: dataclasses.asdict(tier) for name, tier in found.tiers.items()},
            "seconds_per_step": found.seconds if found.fits else None,
            "compute_s": None if timing is None else timing.compute_s,
            "links": {}
            if timing is None
            else {use.link.value: {"bytes": use.bytes, "busy_s": use.busy_s} for use in timing.links},
            "stalls_s": {} if timing is None else {stall.cause.value: stall.seconds for stall in timing.stalls},
            "samples_per_s": found.samples_per_s if found.fits else None,
            "tokens_per_s": found.tokens_per_s if found.fits else None,
            "model_flops_per_step_and_rank": found.flops,
        },
        indent=2,
    )


def render(found: Forecast) -> str:
    """The tables that `plan` prints."""
    lines = [
        f"{found.config} on {found.nodes} x {found.hardware}: {found.ranks} ranks, {found.numel:,} parameters",
        f"fits: {'yes' if found.fits else 'no'}",
        *(
            f"device_memory: {size} ({format_bytes(size)})" if name == "device_memory" else f"largest {name}: {size}"
            for name, size in found.chosen.items()
        ),
        "",
        f"{'of one rank':<12}{'pages':>12}{'reserved':>12}{'gradients':>12}{'activations':>13}{'there are':>12}",
    ]
    for name, tier in found.tiers.items():
        cells = [tier.page_bytes, tier.reserved_bytes, tier.gradient_bytes, tier.activation_bytes, tier.have_bytes]
        widths = (12, 12, 12, 13, 12)
        row = "".join(
            f"{format_bytes(size) if size else '-':>{width}}" for size, width in zip(cells, widths, strict=True)
        )
        lines.append(f"{name:<12}{row}")
    lines += ["", f"{'homes':<12}{'device':>12}{'host':>12}{'disk':>12}"]
    for kind, tiers in found.homes.items():
        lines.append(f"{kind:<12}" + "".join(f"{format_bytes(size) if size else '-':>12}" for size in tiers.values()))
    if found.timing is None:
        return "\n".join(lines)
    timing = found.timing
    lines += ["", f"seconds of a step: {found.seconds:.4g}", f"  compute {timing.compute_s:.4g}"]
    for use in timing.links:
        if use.bytes:
            name = use.link.value.replace("_", " ")
            lines.append(f"  {name} {use.busy_s:.4g} for {format_bytes(use.bytes)}, beside it")
    if found.offloaded_bytes:
        lines.append(f"  activations to RAM and back: {format_bytes(found.offloaded_bytes)} a micro-batch, each way")
    for stall in timing.stalls:
        if stall.seconds > 1e-9:
            lines.append(f"  compute waits {stall.seconds:.4g} for {stall.cause.value}")
    per_step = f"{found.batch_size} samples a rank" + (f", {found.accumulate} times" if found.accumulate > 1 else "")
    tokens = "" if found.tokens_per_s is None else f", {found.tokens_per_s:,.0f} tokens/s"
    lines += [f"binds: {found.binds}", f"{per_step}: {found.samples_per_s:.4g} samples/s{tokens}"]
    if found.seconds > 0:
        lines.append(f"model operations: {found.flops / found.seconds:.3g} a second and rank")
    return "\n".join(lines)
