"""Two network namespaces with a virtual link of a chosen rate between them: the network of two machines, on one.

I1: namespaces and link are removed at the end; their names have the id of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from benchmarks.race import SkipCase

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_FOLDER = Path("/run/netns")
_BURST = "3200"
"""Bytes that the link takes at once: two packets."""


@contextlib.contextmanager
def two_namespaces(rate: str) -> Iterator[list[dict[str, str]]]:
    """Yields what a process of each namespace needs (see `enter`).

    Args:
        rate: of the link in each direction, as `tc` reads it: `22mbit`.

    Raises:
        SkipCase: there is no `ip` or `tc`, or no right to make namespaces.
    """
    names = [f"ptm{os.getpid()}{side}" for side in "ab"]
    places = [
        {"namespace": name, "interface": name, "address": f"10.99.0.{at}"} for at, name in enumerate(names, start=1)
    ]
    try:
        for place in places:
            _do("ip", "netns", "add", place["namespace"])
        _do("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for place in places:
            name = place["namespace"]
            _do("ip", "link", "set", name, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{place['address']}/24", "dev", name)
            for interface in ("lo", name):
                _do("ip", "-n", name, "link", "set", interface, "up")
            limit = ("tbf", "rate", rate, "burst", _BURST, "latency", "2s")
            _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", *limit)
        yield places
    finally:
        for name in names:
            if (_FOLDER / name).exists():
                _do("ip", "netns", "del", name)  # removes the link, too


def enter(place: Mapping[str, str], first: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Moves the calling thread, and threads that it starts, into a namespace, as the only rank of its machine.

    Args:
        place: of this rank.
        first: that of rank 0.
        environment: of the process, which is changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(_FOLDER / place["namespace"], os.O_RDONLY)
    try:
        if libc.setns(handle, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {place['namespace']}")
    finally:
        os.close(handle)
    environment.update(
        MASTER_ADDR=first["address"],
        GLOO_SOCKET_IFNAME=place["interface"],
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=environment["RANK"],
        NODE_RANK=environment["RANK"],
    )


def _do(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise SkipCase(f"no network namespaces: {' '.join(command)} failed ({said.strip()})") from error
