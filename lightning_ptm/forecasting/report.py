"""Output of `plan`: tables for people, or one JSON object."""

from __future__ import annotations

import dataclasses
import json

from lightning_ptm.config import format_bytes
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.forecasting.rates import LinkUse, Timing
from lightning_ptm.terms import Link

LARGEST_BATCH = 1 << 20
"""Most samples of a rank that are considered."""
_NOTHING_S = 1e-9
_OF_A_PASS = (Link.DISK_READ, Link.DISK_WRITE, Link.UPDATE_HOST)
"""Links of lock-free updates, which may serve several steps."""


def as_json(found: Prediction) -> str:
    """One JSON object; seconds, bytes and counts as numbers."""
    timing = found.timing
    return json.dumps(
        {
            "config": found.config,
            "hardware": found.hardware,
            "looked_at": found.looked_at,
            "nodes": found.nodes,
            "ranks": found.ranks,
            "tensor_parallel_size": found.tensor_ranks,
            "parameters": found.numel,
            "fits": found.fits,
            "reason": found.reason,
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
            "seconds_per_step": found.seconds if found.fits else None,
            "compute_s": None if timing is None else timing.compute_s,
            "links": {}
            if timing is None
            else {
                use.link.value: {"bytes": use.bytes, "busy_s": use.busy_s, "collectives": use.collectives}
                for use in timing.links
            },
            "rounds": {} if timing is None else {"count": timing.rounds, "seconds": timing.rounds_s},
            "stalls_s": {} if timing is None else {stall.cause.value: stall.seconds for stall in timing.stalls},
            "samples_per_s": found.samples_per_s if found.fits else None,
            "tokens_per_s": found.tokens_per_s if found.fits else None,
            "model_flops_per_step_and_rank": found.flops,
            "matrix_flops_per_s_and_rank": found.matrix_flops_per_s,
        },
        indent=2,
    )


def render(found: Prediction) -> str:
    """The tables that `plan` prints."""
    lines = [
        f"{found.config} on {found.nodes} x {found.hardware}: {_count(found.ranks, 'rank')}, {found.numel:,} parameters",
        *([f"looked at now: {found.looked_at}"] if found.looked_at else []),
        f"fits: {'yes' if found.fits else 'no'}",
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
    if found.timing is None:
        return "\n".join(lines)
    timing = found.timing
    lines += ["", f"a step: {found.seconds:.4g} s", f"  compute {timing.compute_s:.4g} s"]
    for use in timing.links:
        if use.bytes:
            name = use.link.value.replace("_", " ")
            how = f" in {_count(use.collectives, 'collective')}" if use.collectives else ""
            lines.append(f"  {name} {use.busy_s:.4g} s for {format_bytes(use.bytes)}{how}{_when(use, found, timing)}")
    if timing.rounds:
        messages = _count(timing.rounds, "control message")
        lines.append(f"  {messages} among ranks {timing.rounds_s:.4g} s, while nothing computes")
    if found.offloaded_bytes:
        lines.append(f"  activations to RAM and back: {format_bytes(found.offloaded_bytes)} a micro-batch, each way")
    for stall in timing.stalls:
        if stall.seconds > _NOTHING_S:
            lines.append(f"  compute waits {stall.seconds:.4g} s for {stall.cause.value}")
    late = found.seconds - timing.seconds
    if found.steps_per_pass is not None and late > _NOTHING_S:
        lines.append(
            f"  compute waits {late:.4g} s for lock-free updates: a pass over the states serves up to "
            f"{_count(found.steps_per_pass, 'step')} (max_staleness of lock_free=LockFree(...))"
        )
    whose = "a rank" if found.tensor_ranks == 1 else f"a group of {found.tensor_ranks} ranks"
    per_step = f"{_count(found.batch_size, 'sample')} {whose}" + (
        f", {found.accumulate} times" if found.accumulate > 1 else ""
    )
    tokens = "" if found.tokens_per_s is None else f", {found.tokens_per_s:,.0f} tokens/s"
    lines += [f"bottleneck: {found.binds}", f"{per_step}: {found.samples_per_s:.4g} samples/s{tokens}"]
    if found.seconds > 0:
        share = found.flops_per_s / found.matrix_flops_per_s
        lines.append(f"model operations: {_operations(found.flops_per_s)} a rank, {share:.0%} of the peak matrix rate")
    return "\n".join(lines)


def _when(use: LinkUse, found: Prediction, timing: Timing) -> str:
    """Returns what does not overlap with compute: exchanges, and the part that exceeds all of compute."""
    if use.link in (Link.EXCHANGE, Link.TENSOR_EXCHANGE):
        return ", while nothing computes"
    if found.steps_per_pass is not None and use.link in _OF_A_PASS:
        return " in each pass over the states"
    alone = use.busy_s - timing.compute_s
    return f", at least {alone:.4g} s of it while nothing computes" if alone > _NOTHING_S else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _largest_batch(found: Prediction) -> str:
    largest = found.largest_batch
    if largest is None:
        return "largest batch that fits: not known, for the model computes no batch of another size"
    if not largest:
        return "largest batch that fits: none, not even 1 sample a rank"
    more = " or more" if largest >= LARGEST_BATCH else ""
    how = "" if found.batch_size == largest else " (--batch-size auto plans it)"
    return f"largest batch that fits: {_count(largest, 'sample')} a rank{more}{how}"


def _largest_model(found: Prediction) -> list[str]:
    """Returns how to search the largest model; not done by default, since plans of a dozen models take longer than all
    else."""
    if found.deepens in found.chosen:
        return []
    name = found.deepens or "NAME (an argument of the model)"
    return [f"largest model of this width that fits: --largest {name} finds it"]


def _operations(per_s: float) -> str:
    """A rate such as `110 TFLOP/s`."""
    prefix, unit = ("T", 1e12) if per_s >= 1e12 else ("G", 1e9)
    return f"{per_s / unit:.3g} {prefix}FLOP/s"
