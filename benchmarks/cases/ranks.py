"""Cases with two gloo ranks on one machine, one thread each. A turn lasts as long as its slower rank.

Sides of `two_ranks`, on the same GPT with the same global batch; tokens a second are those of both ranks together:
  ours         AngelPTMStrategy, devices=2
  fsdp2        `fully_shard` on each block, bf16 policy, fused AdamW, defaults otherwise (sides/fsdp2.py)
  fsdp2-keep   the same with reshard_after_forward=False: no second all-gather, all gathered parameters are kept
  one rank     AngelPTMStrategy, devices=1, with the whole batch and as many threads

Sides of `tensor_parallel`, every model state in RAM:
  ours         AngelPTMStrategy(tensor_parallel_size=...)
  loop         a plain PyTorch loop: with one rank sides/plain.py; with two, layers that are cut by hand, the autograd
               Functions of lightning_ptm.parallel between them, plain collectives, fused AdamW (sides/parts.py)
  sequence     ours with TensorParallel(sequence_parallel=True)

Sides of `context_exchange`, every model state in RAM, one text of which two ranks have half of the tokens each:
  ours         AngelPTMStrategy(context_parallel_size=2)
  loop         a plain PyTorch loop with the same autograd Functions, plain collectives, fused AdamW (sides/context.py)

Sides of `two_batches`, a small model whose layers and sums sleep as long as those of a device and a slow link take
(sides/slow_link.py): with and without TensorParallel(overlap="two_batches"), and both recomputed. In `two_batches_network`,
ranks are in two network namespaces, and sums are gloo's over a virtual link of 22 Mbit/s, on which they take as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.case import Case, Figure, Scores, Setup, of_gpt, speed, step
from benchmarks.race import Side

RANKS = 2
SEQUENCE = 256
BATCH = {"25M": 2, "124M": 1}
"""Samples of each rank."""
TEXT = 1024
"""Tokens of a text that ranks divide."""


def _two_ranks(size: str) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        options = of_gpt(setup.shape(size), batch=BATCH[size])
        fsdp2 = {**options, "reduce_dtype": "bfloat16"}
        return [
            setup.ours(options, ranks=RANKS, threads=1),
            Side("fsdp2", "fsdp2", {**fsdp2, "reshard_after_forward": True}, RANKS, threads=1),
            Side("fsdp2-keep", "fsdp2", {**fsdp2, "reshard_after_forward": False}, RANKS, threads=1),
            setup.ours({**options, "batch": RANKS * BATCH[size]}, name="one rank", threads=RANKS),
        ]

    return make


def _two_ranks_figures(tokens: int) -> Callable[[Scores], Sequence[Figure]]:
    def read(scores: Scores) -> Sequence[Figure]:
        return [
            *speed(scores, "fsdp2", tokens=tokens, limit=1.15),
            *speed(scores, "fsdp2-keep", tokens=tokens, limit=1.0),
            *speed(scores, "one rank", tokens=tokens),
        ]

    return read


def _tensor(size: str, ranks: int) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        options = of_gpt(setup.shape(size), batch=BATCH[size])
        groups = {"tensor_parallel_size": ranks} if ranks > 1 else {}
        return [
            setup.ours(options, groups, ranks=ranks, threads=1),
            Side("loop", "parts" if ranks > 1 else "plain", options, ranks, threads=1),
        ]

    return make


def _tensor_figures(scores: Scores) -> Sequence[Figure]:
    return [
        *step(scores, "loop", limit=1.05, name="step over the plain loop's"),
        *_cpu(scores, "loop", "the plain loop's"),
    ]


def _sequence(setup: Setup) -> Sequence[Side]:
    options = of_gpt(setup.shape("25M"), batch=BATCH["25M"])
    groups = {"tensor_parallel_size": RANKS}
    divided = {**groups, "tensor_parallel": {"sequence_parallel": True}}
    return [
        setup.ours(options, divided, name="sequence", ranks=RANKS, threads=1),
        setup.ours(options, groups, ranks=RANKS, threads=1),
    ]


def _sequence_figures(scores: Scores) -> Sequence[Figure]:
    return [
        *step(scores, "ours", ours="sequence", name="step over that without"),
        *_cpu(scores, "ours", "that without", "sequence"),
    ]


def _context(way: str) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        shape = setup.shape("25M")
        options = of_gpt(shape if setup.quick else shape.with_sequence(TEXT), batch=1)
        divided = {"context_parallel_size": RANKS, "context_parallel": way}
        return [
            setup.ours({**options, "precision": "32-true"}, divided, ranks=RANKS, threads=1),
            Side("loop", "context", {**options, "way": way}, RANKS, threads=1),
        ]

    return make


def _context_figures(scores: Scores) -> Sequence[Figure]:
    return [
        *step(scores, "loop", limit=1.10, name="step over that of the same Functions in a plain loop"),
        *_cpu(scores, "loop", "the plain loop's"),
    ]


def _cpu(scores: Scores, other: str, what: str, ours: str = "ours") -> list[Figure]:
    if not {ours, other} <= scores.keys():
        return []
    mine, theirs = (scores[side].step_cpu_s for side in (ours, other))
    return [Figure(f"CPU time of a step over {what}", mine, "s", theirs, mine / theirs, at_least=False)]


# --- Sums behind the other half of a batch -------------------------------------------------------------------------------


NETWORK = "22mbit"
"""Rate at which the 32 KiB of a sum take 12 ms."""


def _two_batches(network: bool) -> Callable[[Setup], Sequence[Side]]:
    return lambda setup: _halves(setup, {"places": setup.two_namespaces(NETWORK)} if network else {"sum_s": 0.012})


def _halves(setup: Setup, link: Mapping[str, object]) -> Sequence[Side]:
    options = {"parts": 4 if setup.quick else 12, "batch": 4, "part_s": 0.006, **link}
    halves = {"tensor_parallel": {"overlap": "two_batches"}}
    sides = {
        "ours": halves,
        "blocking": {},
        "recomputed": {**halves, "recompute": "all"},
        "blocking, recomputed": {"recompute": "all"},
    }
    return [
        Side(name, "slow_link", {**options, "settings": {"tensor_parallel_size": RANKS, **given}}, RANKS, threads=1)
        for name, given in sides.items()
    ]


def _two_batches_figures(whole: float, recomputed: float) -> Callable[[Scores], Sequence[Figure]]:
    def read(scores: Scores) -> Sequence[Figure]:
        name = "step over that with sums that block"
        return [
            *step(scores, "blocking", limit=whole, name=name),
            *step(scores, "blocking, recomputed", ours="recomputed", limit=recomputed, name=f"recomputed {name}"),
        ]

    return read


# --- Communication alone -------------------------------------------------------------------------------------------------


def _communication(setup: Setup) -> Sequence[Side]:
    return [
        Side(name, "collectives", {"direct": direct}, RANKS, threads=1)
        for name, direct in (("ours", True), ("gloo", False))
    ]


def _communication_figures(scores: Scores) -> Sequence[Figure]:
    if not {"ours", "gloo"} <= scores.keys():
        return []
    found = []
    for name, what in (("round_ms", "CPU time of a message of 24 bytes"), ("sum_ms", "CPU time of a sum of 512 KiB")):
        mine, theirs = (scores[side].extra(name) for side in ("ours", "gloo"))
        found.append(Figure(f"{what} over gloo's", mine, "ms", theirs, mine / theirs, at_least=False))
    return found


CASES = (
    *(
        Case(
            id=f"two_ranks-{size}",
            what=f"GPT {size}, two ranks, batch {batch} x {SEQUENCE} each",
            sides=_two_ranks(size),
            figures=_two_ranks_figures(RANKS * batch * SEQUENCE),
            tokens_per_step=RANKS * batch * SEQUENCE,
            repeats=3,
            steps=3,
            warmup=1,
            limit_s=70.0,
        )
        for size, batch in BATCH.items()
    ),
    *(
        Case(
            id=f"tensor_parallel-25M-{ranks}",
            what=f"GPT 25M, everything in RAM, layers divided over {ranks} rank{'s' if ranks > 1 else ''}",
            sides=_tensor("25M", ranks),
            figures=_tensor_figures,
            tokens_per_step=BATCH["25M"] * SEQUENCE,
            repeats=7,
        )
        for ranks in (1, 2)
    ),
    Case(
        id="sequence_parallel-25M",
        what="GPT 25M, everything in RAM, layers divided over 2 ranks, sequence_parallel=True",
        sides=_sequence,
        figures=_sequence_figures,
        tokens_per_step=BATCH["25M"] * SEQUENCE,
        repeats=7,
    ),
    *(
        Case(
            id=f"context_exchange-25M-{way}",
            what=f"GPT 25M, fp32, everything in RAM, a text of {TEXT} tokens divided over 2 ranks, context_parallel='{way}'",
            sides=_context(way),
            figures=_context_figures,
            tokens_per_step=TEXT,
            repeats=7,
            steps=3,
        )
        for way in ("gather", "ulysses", "ring")
    ),
    *(
        Case(
            id=id,
            what=f"two tensor ranks, 12 parts of 6 ms forward and 12 backward (sleeping), {link}",
            sides=_two_batches(network),
            figures=_two_batches_figures(*limits),
            repeats=7,
            steps=3,
            warmup=17,  # the check of halves computes batches 0, 1, 2, 4, 8 and 16 again
        )
        for id, network, link, limits in (
            ("two_batches", False, "12 ms for each sum of a batch", (0.65, 0.78)),
            ("two_batches_network", True, f"in network namespaces with a link of {NETWORK}/s", (0.8, 0.8)),
        )
    ),
    Case(
        id="intra_node",
        what="two ranks of one machine that only communicate, through sockets and shared memory",
        sides=_communication,
        figures=_communication_figures,
        repeats=7,
        steps=1,
        warmup=1,
    ),
)
