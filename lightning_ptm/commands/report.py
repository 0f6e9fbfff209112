"""How `plan` tells what it found: tables for people, one JSON object for machines."""

from __future__ import annotations

import dataclasses
import json

from lightning_ptm.commands.forecast import Forecast
from lightning_ptm.config import format_bytes
from lightning_ptm.planning.timing import Link


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
            when = "while nothing computes" if use.link is Link.EXCHANGE else "beside it"
            lines.append(f"  {name} {use.busy_s:.4g} for {format_bytes(use.bytes)}, {when}")
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
