"""Would io_uring move pages faster than threads do, or with less of the processor's time?

    pip install liburing                # a binding in alpha; Linux 6.14 or newer
    python benchmarks/io_uring.py --log

Both sides read and write blocks of `--page-size` past the page cache, as many bytes each way, `--depth` of them in flight:
  threads  so many threads, each with preadv and pwritev in turns, as memory/io.py's
  ring     one thread and a ring, which is told of the next block when one has ended
in turns, alone, and beside a thread that computes (matrix products and Python between them, as a training loop). Ratios of
bytes a second, of CPU time, and of what compute gets done beside it: ring over threads.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from common import MIB, Bar, argument_parser, disk_folder, publish, quicken
from sides.disk import aligned_block

LIMIT = 1.05
"""What a second way of doing the same would have to bring."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A file's blocks, and memory for those in flight."""

    fd: int
    count: int
    size: int
    memory: list[memoryview]

    def offset(self, transfer: int) -> tuple[bool, int]:
        """Whether the transfer of such a number reads, and where: reads and writes in turns, in halves of the file."""
        half = self.count // 2
        reads = transfer % 2 == 0
        return reads, ((transfer // 2) % half + (0 if reads else half)) * self.size


def by_threads(blocks: Blocks, transfers: int) -> None:
    """As many threads as there is memory."""

    def work(lane: int) -> None:
        buffer = blocks.memory[lane]
        for transfer in range(lane, transfers, len(blocks.memory)):
            reads, offset = blocks.offset(transfer)
            moved = (os.preadv if reads else os.pwritev)(blocks.fd, [buffer], offset)
            assert moved == blocks.size

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(len(blocks.memory))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_ring(blocks: Blocks, transfers: int) -> None:
    """One ring with as many entries as there is memory."""
    import liburing as ring_library

    ring, ended = ring_library.Ring(), ring_library.Cqe()
    vectors = [ring_library.Iovec([memory]) for memory in blocks.memory]
    ring_library.io_uring_queue_init(len(vectors), ring)

    def submit(lane: int, transfer: int) -> None:
        entry = ring_library.io_uring_get_sqe(ring)
        reads, offset = blocks.offset(transfer)
        prepare = ring_library.io_uring_prep_readv if reads else ring_library.io_uring_prep_writev
        prepare(entry, blocks.fd, vectors[lane], offset)
        entry.user_data = lane + 1
        ring_library.io_uring_submit(ring)

    try:
        begun = 0
        for lane in range(min(len(vectors), transfers)):
            submit(lane, begun)
            begun += 1
        for _ in range(transfers):
            ring_library.io_uring_wait_cqe(ring, ended)
            entry = ended[0]
            lane = entry.user_data - 1
            assert entry.res == blocks.size
            ring_library.io_uring_cqe_seen(ring, entry)
            if begun < transfers:
                submit(lane, begun)
                begun += 1
    finally:
        ring_library.io_uring_queue_exit(ring)


@dataclass(frozen=True, slots=True)
class Turn:
    """Bytes a second, CPU seconds of a gigabyte, products a second beside it."""

    speed: float
    cpu_s: float
    products: float


def turn(move: Callable[[Blocks, int], None], blocks: Blocks, transfers: int, computes: bool) -> Turn:
    """One turn of a side."""
    stop, products = threading.Event(), 0
    matrix = torch.randn(512, 512)

    def compute() -> None:
        nonlocal products
        while not stop.is_set():
            torch.mm(matrix, matrix)
            sum(range(300))
            products += 1

    beside = threading.Thread(target=compute)
    if computes:
        beside.start()
    began, cpu = time.perf_counter(), time.process_time()
    move(blocks, transfers)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    done = products
    stop.set()
    if computes:
        beside.join()
    moved = transfers * blocks.size
    return Turn(moved / seconds, cpu_s / moved * 1e9, done / seconds)


def bars(what: str, threads: list[Turn], ring: list[Turn], computes: bool) -> list[Bar]:
    """Ratios of medians, ring over threads."""

    def bar(name: str, unit: str, values: Callable[[Turn], float], at_least: bool) -> Bar:
        ours, other = median(map(values, ring)), median(map(values, threads))
        return Bar(
            f"{what}, {name}", ours, other, unit, ours / other, LIMIT if at_least else 1 / LIMIT, at_least=at_least
        )

    found = [bar("bytes a second", "GB/s", lambda each: each.speed / 1e9, True)]
    if computes:
        return [*found, bar("products a second beside it", "/s", lambda each: each.products, True)]
    return [*found, bar("CPU time of a GB", "s", lambda each: each.cpu_s, False)]


def main() -> None:
    """Measure, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--depth", type=int, default=4, help="blocks in flight")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="moved in a turn")
    args = quicken(parser.parse_args())
    torch.set_num_threads(args.threads)
    size = int(args.page_size * MIB)
    transfers = 32 if args.quick else max(1, int(args.gigabytes * 1e9 / size))
    all_bars: list[Bar] = []
    with disk_folder(args.disk_path) as folder:
        blocks = made(folder, transfers, size, args)
        for computes in (False, True):
            turns: dict[str, list[Turn]] = {"threads": [], "ring": []}
            for repeat in range(args.repeats + 1):
                for name, move in (("threads", by_threads), ("ring", by_ring)):
                    found = turn(move, blocks, transfers, computes)
                    rates = f"{found.speed / 1e9:6.2f} GB/s  {found.cpu_s:.3f} CPU s/GB"
                    print(f"  {name:8} {rates}  {found.products:.0f} products/s")
                    turns[name] += [found] if repeat else []
            what = (
                f"blocks of {args.page_size} MiB, {args.depth} in flight, {'beside compute' if computes else 'alone'}"
            )
            all_bars += bars(f"{what}: ring over threads", turns["threads"], turns["ring"], computes)
        os.close(blocks.fd)
    publish("io_uring.py", args, all_bars, {})


def made(folder: Path, transfers: int, size: int, args: argparse.Namespace) -> Blocks:
    """A file on the disk, written once."""
    fd = os.open(folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    blocks = Blocks(fd, transfers, size, [aligned_block(size) for _ in range(args.depth)])
    os.posix_fallocate(fd, 0, transfers * size)
    by_threads(blocks, 2 * transfers)
    return blocks


if __name__ == "__main__":
    main()
