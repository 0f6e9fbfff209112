"""`lightning-ptm plan gpt3_175b --hardware a100_40gb_x8 --nodes 32`: whether a run would fit on described machines, where its
states would be stored, and how long a step would take.

Reads the config and the machine; question.py answers. Allocates no parameter.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning_ptm.commands.configured import read_config
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.probe import quick_measure
from lightning_ptm.commands.question import Question
from lightning_ptm.commands.search import largest_value, with_argument
from lightning_ptm.config import Settings, format_bytes, parse_bytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting import hardware as machines
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.runtime.deciding.blueprint import Blueprint

_THIS_MACHINE = Path("this machine")

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
    name, looked_at = Path(config_file).name, _free(node) if node.source == _THIS_MACHINE else ""
    if largest is None:
        run = PlannedRun(document, config_file, settings, node)
        return Question(run, name, node, nodes, wanted, looked_at).final(goal, record)

    asked: list[int] = []

    def ask(value: int) -> Question:
        try:
            run = PlannedRun(with_argument(document, largest, value, config_file), config_file, settings, node)
        except ConfigError as error:
            raise ConfigError(
                f"largest is {largest!r}, and the model cannot have {value}: {error}; name an argument that may be any whole "
                f"number, such as layers"
            ) from error
        asked.append(value)
        return Question(run, name, node, nodes, wanted, looked_at)

    first = with_argument(document, largest, None, config_file)["model"]["init_args"][largest]
    value = largest_value(first, lambda value: ask(value).fits(search=goal is not None))
    value = value or min(asked)
    found, blueprint = ask(value).final(goal, record)
    return dataclasses.replace(found, chosen={largest: value} | found.chosen), blueprint


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
