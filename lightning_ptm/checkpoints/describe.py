"""A text that describes a checkpoint: facts, a table of its units, its optimizers. Reads no tensor's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.checkpoints.source import Source, Weight
from lightning_ptm.config import format_bytes
from lightning_ptm.storage.index import PARAMETERS, Index

_LIGHTNING_OWN = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "optimizer_states"}


@dataclass(slots=True)
class _Part:
    """A row of the table: a unit, or in a full checkpoint, which has no units, names with the same beginning."""

    tensors: int = 0
    numel: int = 0
    size_bytes: int = 0
    dtypes: dict[torch.dtype, None] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)

    def add(self, weight: Weight) -> None:
        self.tensors += 1
        self.numel += weight.numel
        self.size_bytes += weight.size_bytes
        self.dtypes[weight.dtype] = None


def describe(source: Source) -> str:
    """Returns the whole text, without a final newline."""
    parts = _parts(source)
    slots = list(dict.fromkeys(slot for part in parts.values() for slot in part.slots))
    rows = [["names" if source.index is None else "unit", "tensors", "elements", "dtype", "weights", *slots]]
    for name, part in parts.items():
        rows.append([name, *_cells(part), *(format_bytes(part.slots[s]) if s in part.slots else "" for s in slots)])
    return "\n".join([*_aligned(_facts(source, parts), "<<"), "", *_aligned(rows, "<>><" + ">" * (1 + len(slots)))])


def _cells(part: _Part) -> list[str]:
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in part.dtypes)
    return [str(part.tensors), f"{part.numel:,}", dtypes, format_bytes(part.size_bytes)]


def _facts(source: Source, parts: Mapping[str, _Part]) -> list[list[str]]:
    dictionary, index = source.dictionary, source.index
    lightning = f"Lightning {dictionary.get('pytorch-lightning_version', 'of an unknown version')}"
    if index is None:
        kind = f"full: one file of Lightning, {format_bytes(source.size_bytes)}"
        writer = f"{lightning}, by rank 0"
    else:
        count = len(source.files)
        kind = f"sharded: {count} safetensors files, {format_bytes(source.size_bytes)}, format version {index.version}"
        ranks = "1 rank" if index.world_size == 1 else f"{index.world_size} ranks"
        writer = f"{index.writer} with {lightning}, by {ranks} with pages of {format_bytes(index.page_size)}"
    facts = [
        ["checkpoint", str(source.path)],
        ["kind", kind],
        ["written by", writer],
        ["step", f"{dictionary.get('global_step', 'unknown')}, in epoch {dictionary.get('epoch', 'unknown')}"],
        *_weights(source),
    ]
    for weight in source.weights:
        facts += [["tied", f"{name} is {weight.names[0]}"] for name in weight.names[1:]]
    for place, text in enumerate(_optimizers(source)):
        facts.append([f"optimizer {place}" if place else "optimizer", text])
    if not dictionary.get("optimizer_states"):
        facts.append(["optimizer", "none: only weights were saved"])
    if source.others:
        facts.append(["extra state", ", ".join(source.others)])
    rest = [str(key) for key in dictionary if key not in _LIGHTNING_OWN]
    return [*facts, ["also", ", ".join(rest)]] if rest else facts


def _weights(source: Source) -> list[list[str]]:
    groups = {"weights": source.weights}  # a full checkpoint does not say which tensors are parameters
    if source.index is not None:
        groups = {
            "parameters": tuple(weight for weight in source.weights if weight.unit is not None),
            "buffers": tuple(weight for weight in source.weights if weight.unit is None),
        }
    return [
        [
            name,
            f"{sum(weight.numel for weight in group):,} in {len(group)} tensor{'s' * (len(group) != 1)}, "
            f"{format_bytes(sum(weight.size_bytes for weight in group))}",
        ]
        for name, group in groups.items()
        if group or name == "parameters"
    ]


def _optimizers(source: Source) -> list[str]:
    """Returns a text for each optimizer: its class if known, and the bytes of each slot."""
    texts = []
    for place, saved in enumerate(source.dictionary.get("optimizer_states") or ()):
        try:
            sizes = _tensor_bytes(saved["state"].values())
            count = sum(len(group["params"]) for group in saved["param_groups"])
        except (AttributeError, KeyError, TypeError):
            texts.append("its state is not in the form of torch's optimizers")
            continue
        name = "of an unknown class"
        if source.index is not None and place < len(source.index.optimizers):
            known = source.index.optimizers[place]
            name, count = known.name, len(known.parameters)
            for slot, size in _slot_bytes(source, source.index, place).items():
                sizes[slot] = sizes.get(slot, 0) + size
        slots = ", ".join(f"{slot} {format_bytes(size)}" for slot, size in sizes.items())
        texts.append(f"{name}, for {count} parameters: {slots or 'no state'}")
    return texts


def _tensor_bytes(states: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for values in states:
        for slot, value in values.items():
            if isinstance(value, Tensor):
                sizes[slot] = sizes.get(slot, 0) + value.numel() * value.itemsize
    return sizes


def _slot_bytes(source: Source, index: Index, optimizer: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    slot_in = index.slots_of(optimizer)
    for file in index.files:
        for stored in source.files[file.name].layout.tensors if file.kind != PARAMETERS else ():
            if (slot := slot_in(file.kind, stored.name)) is not None:
                sizes[slot] = sizes.get(slot, 0) + stored.stop - stored.start
    return sizes


def _parts(source: Source) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    for weight in sorted(source.weights, key=lambda weight: source.index is not None and weight.unit is None):
        if source.index is None:
            name = _beginning(weight.names[0])
        else:
            name = "(buffers)" if weight.unit is None else weight.unit or "(root)"
        parts.setdefault(name, _Part()).add(weight)
    for file in source.index.files if source.index is not None else ():
        if file.kind != PARAMETERS:
            slots = parts.setdefault(file.unit or "(root)", _Part()).slots
            tensors = source.files[file.name].layout.tensors
            slots[file.kind] = slots.get(file.kind, 0) + sum(stored.stop - stored.start for stored in tensors)
    return parts


def _beginning(name: str) -> str:
    """Returns a name up to its first number, or its module: `blocks.3` for `blocks.3.up.weight`, `head` for
    `head.weight`."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit():
            return ".".join(words[: place + 1])
    return ".".join(words[:-1]) or name


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
