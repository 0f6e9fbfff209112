"""Blocks read from and written to a file past the page cache, as many of each, by threads or by io_uring.

Options: `folder`; `how`, "threads" (each with preadv and pwritev in turns, as memory/io.py's) or "ring" (one thread and
a ring, which gets the next block when one has ended; `pip install liburing`); `depth`, blocks in flight; `block_bytes`;
`blocks`, moved in a step; `compute` true has a thread beside it that computes, as a training loop: matrix products, and
Python between them. A turn's extra numbers are bytes a second, CPU seconds of a gigabyte, and products a second.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.race import Baton
from benchmarks.sides.disk import aligned_block


@dataclass(frozen=True, slots=True)
class Blocks:
    """A file's blocks, and memory for those in flight."""

    fd: int
    count: int
    size: int
    memory: list[memoryview]

    def offset(self, transfer: int) -> tuple[bool, int]:
        """Returns whether the transfer of this number reads, and where: reads and writes alternate, each in its half."""
        half = self.count // 2
        reads = transfer % 2 == 0
        return reads, ((transfer // 2) % half + (0 if reads else half)) * self.size


def by_threads(blocks: Blocks, transfers: int) -> None:
    """One thread for each block of memory."""

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
    """One ring with an entry for each block of memory."""
    import liburing

    ring, ended = liburing.Ring(), liburing.Cqe()
    vectors = [liburing.Iovec([memory]) for memory in blocks.memory]
    liburing.io_uring_queue_init(len(vectors), ring)

    def submit(lane: int, transfer: int) -> None:
        entry = liburing.io_uring_get_sqe(ring)
        reads, offset = blocks.offset(transfer)
        prepare = liburing.io_uring_prep_readv if reads else liburing.io_uring_prep_writev
        prepare(entry, blocks.fd, vectors[lane], offset)
        entry.user_data = lane + 1
        liburing.io_uring_submit(ring)

    try:
        begun = 0
        for lane in range(min(len(vectors), transfers)):
            submit(lane, begun)
            begun += 1
        for _ in range(transfers):
            liburing.io_uring_wait_cqe(ring, ended)
            entry = ended[0]
            lane = entry.user_data - 1
            assert entry.res == blocks.size
            liburing.io_uring_cqe_seen(ring, entry)
            if begun < transfers:
                submit(lane, begun)
                begun += 1
    finally:
        liburing.io_uring_queue_exit(ring)


class Computing:
    """A context in which a thread computes, if it is wanted, and counts its products."""

    def __init__(self, wanted: bool) -> None:
        self.products = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compute) if wanted else None

    def __enter__(self) -> Computing:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _compute(self) -> None:
        matrix = torch.randn(512, 512)
        while not self._stop.is_set():
            torch.mm(matrix, matrix)
            sum(range(300))
            self.products += 1


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    move = {"threads": by_threads, "ring": by_ring}[options["how"]]
    size, count = options["block_bytes"], options["blocks"]
    fd = os.open(Path(options["folder"]) / f"blocks-{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, count * size)
        blocks = Blocks(fd, count, size, [aligned_block(size) for _ in range(options["depth"])])
        by_threads(blocks, 2 * count)
        baton.ready()
        while steps := baton.wait():
            with Computing(options["compute"]) as computing:
                began_s, cpu_s = time.perf_counter(), time.process_time()
                move(blocks, steps * count)
                seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
                products = computing.products
            moved = steps * count * size
            found = {
                "bytes_per_s": moved / seconds,
                "cpu_s_per_gb": cpu_s / moved * 1e9,
                "products_per_s": products / seconds,
            }
            baton.report(0.0, found)
    finally:
        os.close(fd)
