"""`lightning_ptm.plan` and `lightning-ptm plan`: whether a run would fit on described machines, where its states would be
stored, and how long a step would take.

Reads the machine and what is to be trained, a config (`forecast_config`) or a module (`forecast_module`); question.py
answers. Allocates no parameter.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_ptm.commands.choice import MOST, Make, choose
from lightning_ptm.commands.choice_report import Choice
from lightning_ptm.commands.configured import read_config
from lightning_ptm.commands.garbage import without_collections
from lightning_ptm.commands.own_module import trained, with_adapters
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.probe import quick_measure
from lightning_ptm.commands.proposals import ACCUMULATE, ADAPTER_RANK
from lightning_ptm.commands.question import Question
from lightning_ptm.commands.sample_batch import meta_batch
from lightning_ptm.commands.search import largest_value, with_argument
from lightning_ptm.config import Settings, format_bytes, parse_bytes
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting import hardware as machines
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.memory.endurance import disk_size, parse_duration
from lightning_ptm.runtime.deciding.blueprint import Blueprint

THIS = "this"
"""The name of this machine as hardware."""
_THIS_MACHINE = Path("this machine")

_MOST_RANKS = 1 << 20
"""Groups of ranks are lists of them, so time and memory of planning grow with the ranks."""
_MOST_SAMPLES = 1 << 30
"""Most samples of a rank; with more, byte counts may exceed what tensors can have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """The machines of a plan.

    Args:
        hardware: a hardware file, or the name of one in configs/hardware/; None or `this`: this machine, measured.
        devices: devices of a machine; None: those of the file.
        nodes: machines of this kind.
        ram, disk: see `with_ram_and_disk`; a disk is one that pages may use.
    """

    hardware: str | None = None
    devices: int | None = None
    nodes: int = 1
    ram: str | int | None = None
    disk: str | None = None

    def node(self, disk_paths: tuple[Path, ...]) -> Node:
        """One of the machines.

        Args:
            disk_paths: folders of the disk tier, measured on this machine.

        Raises:
            ConfigError: there are none such, or they lack a rate that a run on them needs.
        """
        _check_nodes(self.nodes)
        if self.devices is not None and self.devices < 1:
            raise ConfigError(f"devices is {self.devices}, and a run needs at least 1; raise it")
        if self.hardware is None or self.hardware == THIS:
            node = _as_of_now(machines.parsed(quick_measure(disk_paths), _THIS_MACHINE, self.devices))
        else:
            node = machines.look_up(self.hardware, self.devices)
        node = machines.with_ram_and_disk(node, self.ram, self.disk)
        _check_nodes(self.nodes, node.ranks_per_node)
        node.rates(self.nodes)  # raises if a rate is missing, before anything is built
        return node

    def disk_bytes(self, disk_paths: tuple[Path, ...]) -> int | None:
        """Bytes of the smallest disk of this machine, of which the node says what is free; None: as the node says."""
        if self.hardware not in (None, THIS) or self.disk is not None:
            return None
        return min(filter(None, map(disk_size, disk_paths)), default=None)


def plan(
    module: nn.Module,
    batch: Any,
    hardware: str | None = None,
    devices: int = 1,
    *,
    nodes: int = 1,
    precision: str = "32-true",
    dtype: str | torch.dtype | None = None,
    batch_size: str | int | None = None,
    ram: str | int | None = None,
    disk: str | None = None,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    endurance: str | None = None,
    **settings: Any,
) -> Prediction:
    """Tells whether a module fits on machines that you do not have, or on this one, and how fast a step would be.

    The module and the state of random generators stay as they are, and no tensor is copied. What does not fit is no error:
    see `Prediction.fits` and `Prediction.proposals`. `print` shows a sentence and tables; `to_dict` has their numbers.

    Args:
        module: a LightningModule, or a module whose output has a `loss` or is summed, with Adam; on any device, or built
            under `torch.device("meta")`.
        batch: a sample batch, or its shapes: `(8, 2048)`, `"8x2048:int64"`, `{"input_ids": (8, 2048), ...}`.
        hardware: such as `rtx4090`: a name in configs/hardware/, or the path of a hardware file; None or `this`: this
            machine.
        devices: devices of a machine.
        nodes: machines of this kind.
        precision, accumulate_grad_batches, gradient_clip_val: the Trainer's.
        dtype: of a batch of shapes; None: float32.
        batch_size: samples a rank; `auto` finds the largest that fits; None: those of the batch.
        ram: RAM of a machine, such as `64GiB`, in place of the file's.
        disk: a disk that pages may use: a size, a rate or both, such as `2TB, 3GB/s`.
        endurance: how long the disk has to last, such as `3y`, `26w` or `90d`: if it does not, the proposals are changes with
            which it would.
        settings: of the strategy, such as `recompute="all"`.

    Raises:
        ConfigError: an argument is invalid, or the module cannot compute on the meta device.
    """
    given: object = module
    if not isinstance(given, nn.Module):
        what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise ConfigError(
            f"plan takes a module, and was given {what}, so nothing was planned; give an instance of a torch.nn.Module, "
            f"as in plan(MyModule(), batch)"
        )
    own = list(inspect.signature(plan).parameters)[2:-1]
    of_strategy = {field.name for field in dataclasses.fields(Settings)}
    for name in settings.keys() - of_strategy:
        near = difflib.get_close_matches(name, [*own, *of_strategy], n=1)
        if near and near[0] in own:  # the strategy's settings have hints of their own
            raise ConfigError(
                f"plan has no argument {name!r}, so nothing was planned; use {near[0]!r} if you mean that"
            )
    found, _ = forecast_module(
        module,
        meta_batch(batch, dtype),
        Where(hardware, devices, nodes, ram, disk),
        batch_size,
        settings,
        {
            "precision": precision,
            "accumulate_grad_batches": accumulate_grad_batches,
            "gradient_clip_val": gradient_clip_val,
        },
        endurance=endurance,
    )
    return found


def forecast_module(
    module: nn.Module,
    batch: Any,
    where: Where,
    batch_size: str | int | None = None,
    settings: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    record: list[Activity] | None = None,
    device_memory: str | None = None,
    endurance: str | None = None,
) -> tuple[Prediction, Blueprint | None]:
    """The prediction for a module, and its blueprint; None if states fit in no placement.

    Args:
        batch: on the meta device.
        trainer: arguments of the Trainer.
        record: as `steady` takes it.
        endurance: as in `plan`.

    Raises:
        ConfigError: as in `plan`.
    """
    wanted, endurance_s = _wanted_batch(batch_size), _endurance_s(endurance)
    changed, goal = _with_device_memory(settings or {}, device_memory)
    disk_paths = _folders_of_disk(changed, {}, where)
    node, disk_bytes = where.node(disk_paths), where.disk_bytes(disk_paths)
    _check_goal(goal, node)
    kept = trainer or {}
    with without_collections(), isolate_rng():
        model, assumed = trained(module)

        def adapted() -> PlannedRun:
            other, _ = trained(module)
            if not with_adapters(other, ADAPTER_RANK):
                raise ConfigError("the model has no linear layer that could have a LoRA adapter; plan it without one")
            return PlannedRun(other, batch, kept, changed, node)

        run = PlannedRun(model, batch, kept, changed, node)
        question = Question(
            run,
            type(module).__name__,
            node,
            where.nodes,
            wanted,
            adapted,
            assumed,
            _looked_at(node),
            disk_bytes,
            endurance_s,
        )
        return question.final(goal, record)


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
    """`forecast_config` for runs whose states fit.

    Raises:
        ConfigError: as in `forecast_config`.
        CapacityError: model states fit in no placement; names the limiting number.
    """
    found, blueprint = forecast_config(
        config_file,
        Where(hardware, nodes=nodes),
        batch_size,
        strategy,
        record=record,
        device_memory=device_memory,
        largest=largest,
    )
    if blueprint is None:
        raise CapacityError(found.reason)
    return found, blueprint


def forecast_config(
    config_file: str | Path,
    where: Where,
    batch_size: str | int | None = None,
    strategy: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    record: list[Activity] | None = None,
    device_memory: str | None = None,
    largest: str | None = None,
    endurance: str | None = None,
) -> tuple[Prediction, Blueprint | None]:
    """The prediction for a config, and its blueprint; None if states fit in no placement.

    Args:
        batch_size, strategy, device_memory, largest: as for the command `plan`.
        trainer: arguments of the Trainer in place of the config's.
        record: as `steady` takes it.
        endurance: as in `plan`.

    Raises:
        ConfigError: a config, hardware file or argument is invalid.
    """
    wanted, endurance_s = _wanted_batch(batch_size), _endurance_s(endurance)
    settings, goal = _with_device_memory(strategy or {}, device_memory)
    document = dict(read_config(Path(config_file)))
    document["trainer"] = {**(document.get("trainer") or {}), **(trainer or {})}
    disk_paths = _folders_of_disk(settings, document, where)
    node, disk_bytes = where.node(disk_paths), where.disk_bytes(disk_paths)
    _check_goal(goal, node)
    name = Path(config_file).name

    def question(document: Mapping[str, Any]) -> Question:
        run = PlannedRun.of_config(document, config_file, settings, node)

        def adapted() -> PlannedRun:
            return PlannedRun.of_config(document, config_file, settings, node, adapter_rank=ADAPTER_RANK)

        return Question(
            run,
            name,
            node,
            where.nodes,
            wanted,
            adapted,
            looked_at=_looked_at(node),
            disk_bytes=disk_bytes,
            endurance_s=endurance_s,
        )

    if largest is None:
        return question(document).final(goal, record)

    asked: list[int] = []

    def ask(value: int) -> Question:
        try:
            made = question(with_argument(document, largest, value, config_file))
        except ConfigError as error:
            raise ConfigError(
                f"largest is {largest!r}, and the model cannot have {value}: {error}; name an argument that may be any whole "
                f"number, such as layers"
            ) from error
        asked.append(value)
        return made

    first = with_argument(document, largest, None, config_file)["model"]["init_args"][largest]
    value = largest_value(first, lambda value: ask(value).fits(search=goal is not None))
    value = value or min(asked)
    found, blueprint = ask(value).final(goal, record)
    return dataclasses.replace(found, chosen={largest: value} | found.chosen), blueprint


def choice_of_config(
    config_file: str | Path,
    where: Where,
    batch_size: str | int | None = None,
    strategy: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    most: int = MOST,
) -> Choice:
    """The fastest divisions of the ranks for a config; settings that it has, or `strategy`, stay.

    Args:
        batch_size: a number or None: all divisions have as many samples a step; `auto`: each has the largest batch that fits.
        most: most runs to predict.

    Raises:
        ConfigError: as in `forecast_config`.
        CapacityError: nothing that was tried fits.
    """
    wanted = _wanted_batch(batch_size)
    changed = dict(strategy or {})
    document = dict(read_config(Path(config_file)))
    document["trainer"] = {**(document.get("trainer") or {}), **(trainer or {})}
    node = where.node(_folders_of_disk(changed, document, where))

    def make(sizes: Mapping[str, Any], accumulate: int) -> PlannedRun:
        run = {**document, "trainer": {**document["trainer"], ACCUMULATE: accumulate}}
        return PlannedRun.of_config(run, config_file, {**changed, **sizes}, node)

    return _chosen(make, Path(config_file).name, node, where, document["trainer"], changed, wanted, most)


def choice_of_module(
    module: nn.Module,
    batch: Any,
    where: Where,
    batch_size: str | int | None = None,
    settings: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    most: int = MOST,
) -> Choice:
    """The fastest divisions of the ranks for a module; arguments as in `choice_of_config` and `forecast_module`."""
    wanted = _wanted_batch(batch_size)
    changed = dict(settings or {})
    node = where.node(_folders_of_disk(changed, {}, where))

    def make(sizes: Mapping[str, Any], accumulate: int) -> PlannedRun:
        model, _ = trained(module)
        return PlannedRun(model, batch, {**(trainer or {}), ACCUMULATE: accumulate}, {**changed, **sizes}, node)

    return _chosen(make, type(module).__name__, node, where, trainer or {}, changed, wanted, most)


def _chosen(
    make: Make,
    name: str,
    node: Node,
    where: Where,
    trainer: Mapping[str, Any],
    changed: Mapping[str, Any],
    wanted: Literal["auto"] | int | None,
    most: int,
) -> Choice:
    if most < 1:
        raise ConfigError(f"most is {most}, and at least 1 run has to be predicted; raise it")
    given = trainer.get("strategy")
    ours = dict(given.get("init_args") or {}) if isinstance(given, Mapping) else {}
    with without_collections(), isolate_rng():
        return choose(
            make,
            name,
            node,
            where.nodes,
            {**ours, **changed},
            samples=wanted,
            accumulate=trainer.get(ACCUMULATE) or 1,
            looked_at=_looked_at(node),
            most=most,
        )


def _with_device_memory(settings: Mapping[str, Any], device_memory: str | None) -> tuple[dict[str, Any], str | None]:
    """Settings with the one that `device_memory` gives, and the goal of a search for it."""
    changed = dict(settings)
    if device_memory is None or device_memory in ("best", "least"):
        return changed, device_memory
    try:
        changed["device_memory"] = parse_bytes(device_memory, name="device_memory")
    except ConfigError as error:
        raise ConfigError(f"{error}; or say 'best' or 'least'") from error
    return changed, None


def _check_goal(goal: str | None, node: Node) -> None:
    if goal is not None and not node.has_own_memory:
        raise ConfigError(
            f"device_memory is {goal!r}, and {node.name} is a CPU, whose device tier is RAM; leave it out, or give a size"
        )


def _folders_of_disk(changed: dict[str, Any], document: Mapping[str, Any], where: Where) -> tuple[Path, ...]:
    """Returns the disk tier's folders of a run with this config; the current folder if a disk is needed and none is given.

    Args:
        changed: gets a `disk_path` where a disk was asked for that pages could not use otherwise.
    """
    strategy = (document.get("trainer") or {}).get("strategy")
    ours = dict(strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}
    given = {**ours, **changed}
    offered = where.disk not in (None, "none") and not given.get("disk_path")
    # Some settings are refused without a disk, so they are checked with the one that is offered.
    settings = Settings.of({**given, "disk_path": "/nvme"} if offered else given)
    on_disk = "disk" in (settings.offload_parameters, settings.wanted_offload_optimizer)
    if offered and not on_disk:
        changed["disk_path"] = "/nvme"
    here = (Path.cwd(),) if on_disk else ()
    return here if offered else settings.disk_paths or here


def _looked_at(node: Node) -> str:
    return _free(node) if node.source == _THIS_MACHINE else ""


def _as_of_now(node: Node) -> Node:
    """Returns this machine with its free bytes rounded, so that consecutive plans are about the same machine."""
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


def _endurance_s(endurance: str | None) -> float | None:
    return None if endurance is None else parse_duration(endurance, name="endurance")


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
