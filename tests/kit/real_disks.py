"""Real file systems of a chosen kind and size, for tests that root runs: mounted in a test's own folder, gone after it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_SHUT_DOWN = 0x8004587D
"""FS_IOC_SHUTDOWN of <linux/fs.h>."""
_WITHOUT_FLUSH = 2


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, kind: str, size_bytes: int) -> Iterator[Path]:
    """A new file system: "ext4" (on a file beside the folder), "tmpfs" or "overlay" (of folders beside it).

    Skips the test where nobody may mount, or the system has no such file system.
    """
    folder.mkdir(parents=True)
    image = folder.with_suffix(".image")
    commands: list[tuple[object, ...]]
    if kind == "ext4":
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("needs mkfs.ext4")
        with image.open("wb") as file:
            file.truncate(size_bytes)
        commands = [("mkfs.ext4", "-q", "-F", "-m", "0", image), ("mount", "-o", "loop", image, folder)]
    elif kind == "tmpfs":
        commands = [("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder)]
    else:
        parts = {name: folder.with_suffix(f".{name}") for name in ("lowerdir", "upperdir", "workdir")}
        for part in parts.values():
            part.mkdir()
        options = ",".join(f"{name}={part}" for name, part in parts.items())
        commands = [("mount", "-t", "overlay", "-o", options, "overlay", folder)]
    try:
        for command in commands:
            _run(*command)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the right to mount {kind}: {error.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        gc.collect()  # a trainer that is garbage may have a checkpoint mapped
        _run("umount", folder)  # which fails while somebody has a file open there
        image.unlink(missing_ok=True)


def fill(folder: Path) -> Path:
    """Takes all that is free; returns the file that has it."""
    file = folder / "of_others"
    with file.open("wb", buffering=0) as taken:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while taken.write(b"x" * size) == size:
                    pass
        with contextlib.suppress(OSError):
            os.fsync(taken)
    return file


def break_down(folder: Path) -> None:
    """From now on each read and write of an ext4 there fails with EIO, as those of a disk that was pulled out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUT_DOWN, struct.pack("I", _WITHOUT_FLUSH))
    finally:
        os.close(descriptor)
