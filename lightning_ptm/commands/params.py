"""`lightning-ptm params gpt3_175b`: the size of a config's model, before anything is allocated.

Builds the model on the meta device and reads three settings (precision, strategy, units) without making a Trainer. Owns
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_ptm.commands.configured import builder, read_config
from lightning_ptm.config import format_bytes
from lightning_ptm.errors import AngelPTMError, ConfigError
from lightning_ptm.parallel.counted_group import CountedTensorGroup
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.rules import plan_of
from lightning_ptm.runtime.deciding.specs import compute_dtype, keeps_fp32
from lightning_ptm.runtime.units.discovery import Unit, discover
from lightning_ptm.trainer.precision import AngelPTMPrecision

ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class ModelStateBytes:
    """Bytes of model states over all ranks: compute parameters, gradients, master states."""

    p16: int
    g16: int
    master: int

    @property
    def total(self) -> int:
        return self.p16 + self.g16 + self.master


@dataclass(frozen=True, slots=True)
class ModelCount:
    """Counts of a model's parameters.

    Attributes:
        parts: parameters by kind of part, largest first. A part is the outermost module of its unit that contains no other
            unit; its kind is its class.
        numel: all parameters; a shared one counts once.
        precision: the Trainer's.
        states: bytes of model states, with Adam.
        units: number of units, including the root.
        largest_unit, largest_unit_numel: name and parameters of the largest unit.
        tensor_ranks: number of ranks that divide layers (`tensor_parallel_size`).
        largest_unit_part: parameters of the largest unit on one of them.
    """

    parts: dict[str, int]
    numel: int
    precision: str
    states: ModelStateBytes
    units: int
    largest_unit: str
    largest_unit_numel: int
    tensor_ranks: int
    largest_unit_part: int


def count(config: str | Path) -> ModelCount:
    """Counts the model of a config file. Takes seconds and no memory for parameters, whatever their number.

    Raises:
        ConfigError: the file names no model, or one that cannot be built.
    """
    document = read_config(Path(config))
    model = build_on_meta(document, config)
    trainer = document.get("trainer") or {}
    strategy = trainer.get("strategy")
    settings = (strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}
    units = discover(model, settings.get("units", "auto"))
    # The Trainer's own default.
    precision = AngelPTMPrecision(trainer.get("precision") or "32-true")
    sizes = {unit.name or "the root": sum(p.parameter.numel() for p in unit.parameters) for unit in units}
    largest = max(sizes, key=sizes.__getitem__)
    parts, states = _parts(model, units), _states(model, precision)
    tensor_ranks = settings.get("tensor_parallel_size", 1)
    plan = (settings.get("tensor_parallel") or {}).get("plan", "auto")
    if tensor_ranks > 1:  # replaces the parameters by a rank's slices
        CutModule(model, plan_of(model, plan), CountedTensorGroup(tensor_ranks), strict=plan != "auto", proven=False)
    return ModelCount(
        parts=parts,
        numel=sum(sizes.values()),
        precision=precision.precision,
        states=states,
        units=len(units),
        largest_unit=largest,
        largest_unit_numel=sizes[largest],
        tensor_ranks=tensor_ranks,
        largest_unit_part=max(sum(p.parameter.numel() for p in unit.parameters) for unit in units),
    )


def render(title: str, counted: ModelCount) -> str:
    """The table that `params` prints."""
    width = max(len("part"), *map(len, counted.parts))
    lines = [title, "", f"{'part':<{width}}  {'parameters':>21}  share"]
    for kind, numel in [*counted.parts.items(), ("total", counted.numel)]:
        lines.append(f"{kind:<{width}}  {numel:>21,}  {numel / counted.numel:5.1%}")
    states = counted.states
    lines += ["", f"model states of all ranks together, {counted.precision}, Adam: {format_bytes(states.total)}"]
    for name, size in (("p16", states.p16), ("g16", states.g16), ("master", states.master)):
        lines.append(f"{name:<6}  {format_bytes(size):>11}")
    share = states.p16 / counted.numel
    lines += [
        "",
        f"{counted.units:,} units; the largest is {counted.largest_unit}: {counted.largest_unit_numel:,} parameters, about "
        f"{format_bytes(counted.largest_unit_numel * share)} while it computes",
    ]
    if counted.tensor_ranks > 1:
        lines.append(
            f"tensor_parallel_size={counted.tensor_ranks}: a rank computes with {counted.largest_unit_part:,} of a unit's "
            f"parameters at most, about {format_bytes(counted.largest_unit_part * share)}"
        )
    return "\n".join(lines)


def build_on_meta(document: Mapping[str, Any], path: str | Path) -> LightningModule:
    """The model of a config, with its parameters on the meta device.

    Raises:
        ConfigError: it cannot be built.
    """
    build = builder(LightningModule, "model", document["model"], path)
    try:
        with torch.device("meta"):
            model = build()
            model.configure_model()
    except AngelPTMError:
        raise
    except Exception as error:  # a user's model may raise anything
        cause: BaseException = error
        while cause.__cause__ is not None:  # jsonargparse wraps it in its own message
            cause = cause.__cause__
        raise ConfigError(
            f"the model of {path}, {document['model'].get('class_path')}, cannot be built on the meta device "
            f"({type(cause).__name__}: {cause}), so its parameters cannot be counted without memory; make __init__ and "
            f"configure_model work without the values of tensors"
        ) from error
    return model


def _parts(model: nn.Module, units: tuple[Unit, ...]) -> dict[str, int]:
    modules = dict(model.named_modules())
    around_units = {""}
    for unit in units:
        components = unit.name.split(".")
        around_units.update(".".join(components[:depth]) for depth in range(1, len(components)))
    numel_of: dict[str, int] = {}
    for unit in units:
        for item in unit.parameters:
            *components, _ = item.name.split(".")
            name = unit.name
            for depth in range(len(name.split(".")) if name else 0, len(components)):
                if name != unit.name and name not in around_units:
                    break
                name = ".".join(components[: depth + 1])
            kind = type(modules[name]).__name__
            numel_of[kind] = numel_of.get(kind, 0) + item.parameter.numel()
    return dict(sorted(numel_of.items(), key=lambda pair: -pair[1]))


def _states(model: nn.Module, precision: AngelPTMPrecision) -> ModelStateBytes:
    kept = {id(p) for module in model.modules() if keeps_fp32(module) for p in module.parameters(recurse=False)}
    p16 = g16 = master = 0
    for parameter in model.parameters():
        plan = precision.plan
        itemsize = compute_dtype(parameter, plan.compute, mixed=plan.mixed, keeps_fp32=id(parameter) in kept).itemsize
        numel = parameter.numel()
        p16 += numel * itemsize
        if parameter.requires_grad:
            g16 += numel * itemsize
            has_copy = plan.mixed and itemsize < 4
            master += numel * (4 * (1 + ADAM_MOMENTS) if has_copy else itemsize * ADAM_MOMENTS)
    return ModelStateBytes(p16, g16, master)
