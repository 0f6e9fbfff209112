"""Two machines on this one, for tests that root runs: each has a network, a host name and addresses of its own, and they
share files and a cable. Gone after the test, with all that still runs there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Node:
    """One of them.

    Attributes:
        name: of the host and of its network.
        interface: the end of the cable; address: there.
    """

    name: str
    interface: str
    address: str

    def command(self, *command: object) -> list[str]:
        """`command` as this machine's."""
        there = (
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            self.name,
        )
        return [str(part) for part in (*there, *command)]

    def processes(self) -> list[int]:
        """All that run there."""
        found = subprocess.run(("ip", "netns", "pids", self.name), check=True, capture_output=True, text=True)
        return [int(number) for number in found.stdout.split()]

    def power_off(self) -> None:
        """Nothing there gets to say goodbye."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Makes them; skips the test where nobody may."""
    run = os.getpid()
    nodes = tuple(Node(f"ptm-{run}-{side}", f"ptm{run}-{side}", f"10.213.0.{side + 1}") for side in range(2))
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        _ip("link", "add", nodes[0].interface, "type", "veth", "peer", "name", nodes[1].interface)
        for node in nodes:
            _ip("link", "set", node.interface, "netns", node.name)
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.interface)
            for interface in ("lo", node.interface):
                _ip("-n", node.name, "link", "set", interface, "up")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        _remove(nodes)
        said = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        pytest.skip(f"needs the right to make networks: {said}")
    try:
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.power_off()
        _remove(nodes)


def _remove(nodes: tuple[Node, ...]) -> None:
    for node in nodes:
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            _ip("netns", "del", node.name)  # and with it the cable
