"""`lightning-ptm plan gpt3_175b --hardware a100_40gb_x8 --nodes 32`: whether a run would fit on described machines, where its
states would be stored, and how long a step would take.

Uses a run's own decisions: the strategy's request, `decide`, `make_plan`. Adds seconds to the ticks of the plan's trace
(forecasting/estimate.py) and replays it (forecasting/timing.py: steady). Allocates no parameter.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_ptm.commands.configured import read_config
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.probe import quick_measure
from lightning_ptm.commands.room import Sizes, activation_room, host_room, shortage
from lightning_ptm.commands.search import largest_value, with_argument
from lightning_ptm.config import Settings, format_bytes, parse_bytes
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting import hardware as machines
from lightning_ptm.forecasting.estimate import resized, sample_count, token_count
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import Prediction, homes_of, pages_by_use, tiers_of
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.forecasting.step_seconds import StepTime, exchanges, step_time, timed
from lightning_ptm.runtime.autograd.recompute import recomputed_around, recomputed_units
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.deciding.remedies import with_remedies
from lightning_ptm.runtime.engine.inspection import optimizers_in_pages
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.terms import Mode, Tier

_THIS_MACHINE = Path("this machine")

_DEVICE_SHARES = 16
"""Number of equal parts of a device's memory among which `device_memory` is searched."""

_MOST_RANKS = 1 << 20
"""Groups of ranks are lists of them, so time and memory of planning grow with the ranks."""
_MOST_SAMPLES = 1 << 30
"""Most samples of a rank; with more, byte counts may exceed what tensors can have."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Disables garbage collection: a hundred thousand modules and tasks live to the end, and scanning them takes a third of
    the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def forecast(
    config_file: str | Path,
    hardware: str | None,
    nodes: int = 1,
    batch_size: str | int | None = None,
    strategy: Mapping[str, Any] | None = None,
    record: list[Activity] | None = None,
    *,
    device_memory: str | None = None,
    largest: str | None = None,
) -> tuple[Prediction, Blueprint]:
    """The prediction that `plan` prints, and its blueprint; arguments as in `plan`, `record` as `steady` takes it.

    Raises:
        ConfigError: a config, hardware file or argument is invalid.
        CapacityError: model states fit in no placement; names the limiting number.
    """
    _check_nodes(nodes)
    wanted = _wanted_batch(batch_size)
    settings = dict(strategy or {})
    document = read_config(Path(config_file))
    if hardware is None:
        node = _as_of_now(machines.parsed(quick_measure(_disk_paths(document, settings)), _THIS_MACHINE))
    else:
        node = machines.look_up(hardware)
    goal = device_memory if device_memory in ("best", "least") else None
    if device_memory is not None and goal is None:
        try:
            settings["device_memory"] = parse_bytes(device_memory, name="device_memory")
        except ConfigError as error:
            raise ConfigError(f"{error}; or say 'best' or 'least'") from error
    if goal is not None and not node.has_own_memory:
        raise ConfigError(
            f"device_memory is {goal!r}, and {node.name} is a CPU, whose device tier is RAM; leave it out, or give a size"
        )
    _check_nodes(nodes, node.ranks_per_node)
    node.rates(nodes)  # raises if a rate is missing, before anything is built
    if largest is None:
        question = _Question(PlannedRun(document, config_file, settings, node), config_file, node, nodes, wanted)
        return question.final(goal, record)

    asked: list[int] = []

    def ask(value: int) -> _Question:
        try:
            run = PlannedRun(with_argument(document, largest, value, config_file), config_file, settings, node)
        except ConfigError as error:
            raise ConfigError(
                f"largest is {largest!r}, and the model cannot have {value}: {error}; name an argument that may be any whole "
                f"number, such as layers"
            ) from error
        asked.append(value)
        return _Question(run, config_file, node, nodes, wanted)

    first = with_argument(document, largest, None, config_file)["model"]["init_args"][largest]
    value = largest_value(first, lambda value: ask(value).fits(search=goal is not None))
    value = value or min(asked)
    found, blueprint = ask(value).final(goal, record)
    return dataclasses.replace(found, chosen={largest: value} | found.chosen), blueprint


class _Question:
    """Predictions for one config on some nodes, with several values of device_memory.

    Args:
        wanted: samples per rank; None: the config's.
    """

    def __init__(
        self, run: PlannedRun, path: str | Path, node: Node, nodes: int, wanted: Literal["auto"] | int | None
    ) -> None:
        # Configuration.
        self._run = run
        self._path = path
        self._node = node
        self._nodes = nodes
        self._wanted = wanted
        # State.
        self._sizes: Sizes | None = None
        """The sizes of units, made for the first blueprint; units and ticks are the same for all."""
        self._rooms = (0, 0)
        """Bytes that pages leave to activations on the device and in RAM, in the last prediction."""

    def final(self, goal: str | None, record: list[Activity] | None) -> tuple[Prediction, Blueprint]:
        """The prediction, after a search if there is a goal, with the largest batch that would fit."""
        try:
            found, blueprint = self.search(goal, record) if goal is not None else self.answer(record)
        except CapacityError as error:
            alone = partial(decide, world_size=self._node.ranks_per_node * self._nodes)
            raise with_remedies(error, self._run.request, self._node.machine(), alone) from error
        if self._wanted == "auto":
            return dataclasses.replace(found, largest_batch=found.batch_size), blueprint
        assert self._sizes is not None
        try:
            largest = self._sizes.largest(*self._rooms)
        except ConfigError:  # a model may make its own batch, and accept no other size
            return found, blueprint
        return dataclasses.replace(found, largest_batch=largest), blueprint

    def search(self, goal: str, record: list[Activity] | None = None) -> tuple[Prediction, Blueprint]:
        """The prediction for the `best` device_memory or the `least` one; for the config's if none fits."""
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
        found, blueprint = self.answer(record, chosen[0])
        return dataclasses.replace(found, chosen={"device_memory": chosen[1]}), blueprint

    def fits(self, *, search: bool) -> bool:
        """Returns whether the run fits on the machine. With `search`, tries several sizes of device memory, largest
        first."""
        for settings in [settings for settings, _ in reversed(self._parts())] if search else [None]:
            try:
                if self.answer(None, settings)[0].fits:
                    return True
            except CapacityError:
                continue
        return False

    def answer(self, record: list[Activity] | None, settings: Settings | None = None) -> tuple[Prediction, Blueprint]:
        """The prediction for these settings, by default the config's; see `forecast`."""
        run, node = self._run, self._node
        request = run.request if settings is None else dataclasses.replace(run.request, settings=settings)
        dtype = str(request.compute).removeprefix("torch.")
        node.flops_per_s(dtype)  # raises before the model is laid out
        world_size = node.ranks_per_node * self._nodes
        blueprint = decide(request, node.machine(), world_size)
        made = make_plan(blueprint, Mode.TRAIN, blueprint.planned(blueprint.trace))
        recomputed = recomputed_units(len(blueprint.units), request.settings.recompute_every)
        again = recomputed_around(blueprint.units, recomputed)
        sizes = self._sizes = self._sizes or Sizes(run, blueprint, recomputed)
        takes = predicted_memory(blueprint, made, blueprint.trace, again, sizes.ends_with(self._wanted))
        room = activation_room(blueprint, takes, node)
        ram_room = host_room(blueprint, node)
        self._rooms = room, ram_room
        samples = sizes.largest(room, ram_room) if self._wanted == "auto" else (self._wanted or sample_count(run.batch))
        ticks, works = sizes.at(max(samples, 1))
        peak, offloaded = max(ticks), sizes.offloaded(works)
        fits = samples > 0 and peak <= room and offloaded <= ram_room
        short = Tier.DEVICE if peak > room or offloaded <= ram_room else Tier.HOST
        step = StepTime(None, 0.0, f"memory for activations on the {short.name.lower()} tier")
        if fits:
            forward_s = [node.seconds(work, dtype) for work in works]
            trace = timed(blueprint.trace, forward_s, recomputed | again.keys(), node.unit_s or 0.0)
            rates, sent = node.rates(self._nodes, blueprint.holders), exchanges(blueprint, works, trace, again)
            step = step_time(blueprint, takes.plan, trace, node, rates, run.accumulate, offloaded, sent, record)
        lacking = (peak, room) if short is Tier.DEVICE else (offloaded, ram_room)
        reason = "" if fits else shortage(short, max(samples, 1), *lacking, node, unified=blueprint.unified)
        return (
            Prediction(
                config=Path(self._path).name,
                hardware=node.name,
                nodes=self._nodes,
                ranks=world_size,
                tensor_ranks=run.tensor_ranks,
                numel=blueprint.layout.whole_numel,
                fits=fits,
                reason=reason,
                homes=homes_of(blueprint),
                tiers=tiers_of(blueprint, takes, node, {Tier.DEVICE: peak, Tier.HOST: offloaded}),
                pages=pages_by_use(blueprint),
                optimizers=optimizers_in_pages(blueprint),
                batch_size=samples,
                tokens=token_count(resized(run.batch, max(samples, 1))),
                accumulate=run.accumulate,
                flops=3 * sum(work.flops for work in works) * run.accumulate,
                timing=step.timing,
                seconds=step.seconds,
                binds=step.binds,
                steps_per_pass=None if blueprint.lock_free is None else max(1, blueprint.lock_free.max_staleness),
                chosen={},
                plan=made,
                page_ticks=takes.device_per_tick,
                activation_ticks=ticks,
                offloaded_bytes=offloaded,
                deepens=run.deepens,
                looked_at=_free(node) if node.source == _THIS_MACHINE else "",
                matrix_flops_per_s=node.compute_flops_per_s[dtype],
            ),
            blueprint,
        )

    def _parts(self) -> list[tuple[Settings, int]]:
        """Settings with each device_memory to search, smallest first."""
        sizes = [self._node.device_memory * part // _DEVICE_SHARES for part in range(1, _DEVICE_SHARES)]
        settings = self._run.request.settings
        return [(dataclasses.replace(settings, device_memory=size), size) for size in sizes]


def _disk_paths(document: Mapping[str, Any], changed: Mapping[str, Any]) -> tuple[Path, ...]:
    """The disk tier's folders of a run with this config; the current folder if a disk is needed and none is given."""
    given = (document.get("trainer") or {}).get("strategy")
    ours = dict(given.get("init_args") or {}) if isinstance(given, Mapping) else {}
    settings = Settings.of({**ours, **changed})
    on_disk = "disk" in (settings.offload_parameters, settings.wanted_offload_optimizer)
    return settings.disk_paths or ((Path.cwd(),) if on_disk else ())


def _as_of_now(node: Node) -> Node:
    """This machine with its free bytes rounded, so that consecutive plans are about the same machine."""
    return dataclasses.replace(
        node,
        device_memory=_round(node.device_memory),
        host_memory=_round(node.host_memory),
        disk_memory=_round(node.disk_memory),
    )


def _round(size: int) -> int:
    """Rounds down to a sixteenth of the largest power of two in it."""
    step = max(1, 1 << max(size.bit_length() - 5, 0))
    return size // step * step


def _free(node: Node) -> str:
    rooms = {"device memory": node.device_memory, "RAM": node.host_memory, "disk": node.disk_memory}
    return ", ".join(f"{format_bytes(size)} of {name} free" for name, size in rooms.items() if size)


def _check_nodes(nodes: int, ranks_per_node: int = 1) -> None:
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}, and a run needs at least 1 machine; raise it")
    if nodes * ranks_per_node > _MOST_RANKS:
        raise ConfigError(
            f"nodes is {nodes}, which makes {nodes * ranks_per_node:,} ranks or more, and at most {_MOST_RANKS:,} can be "
            f"planned; lower it"
        )


def _wanted_batch(batch_size: str | int | None) -> Literal["auto"] | int | None:
    if batch_size is None:
        return None
    if batch_size == "auto":
        return "auto"
    try:
        samples = int(batch_size)
    except ValueError:
        samples = 0
    if not 1 <= samples <= _MOST_SAMPLES:
        raise ConfigError(
            f"batch_size is {batch_size!r}; give a number from 1 to {_MOST_SAMPLES}, or 'auto' for the largest that fits"
        )
    return samples
