"""The communicators of one run, by the axes of its mesh.

Owns which ranks each communicator has. Knows axes and their sizes, not what ranks do along them.

I1: axes that reach all ranks give the communicator of all ranks; a rank that is alone along its axes gets a
    SoloCommunicator.
I2: all communicators are made at the start, in the same order on all ranks; `along` makes none.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from lightning_ptm.comm.background_group import BackgroundGroup
from lightning_ptm.comm.communicator import Communicator, SoloCommunicator
from lightning_ptm.planning.mesh import Axis, Mesh


class Communicators:
    """Communicators of the ranks that differ from this one only along some axes. Collective: makes process groups.

    Args:
        mesh: axes and sizes.
        world: communicator of all ranks of the mesh; closes those made here.
        background: axes along which ranks exchange data in the background of training; the same on all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        world: Communicator,
        background: Collection[Axis] = (),
    ) -> None:
        self._mesh = mesh
        self.world = world
        self._made: dict[frozenset[Axis], Communicator] = {frozenset(): SoloCommunicator(), frozenset(mesh.axes): world}
        for axes in _combinations(mesh):
            if axes not in self._made:
                self._made[axes] = world.subgroup(mesh.groups(axes))
        nontrivial = self._nontrivial(background)
        self.background: BackgroundGroup | None = (
            world.background_group(mesh.groups(nontrivial)) if nontrivial else None
        )
        """Group of the ranks that differ from this one only along `background`; None if there are no others."""

    def along(self, axes: Collection[Axis]) -> Communicator:
        """Returns the communicator of the ranks that differ from this one only along these axes: all axes except some of
        those with parameters of their own, or one of these."""
        return self._made[self._nontrivial(axes)]

    def _nontrivial(self, axes: Collection[Axis]) -> frozenset[Axis]:
        """Returns those of the axes along which there is more than one rank."""
        return frozenset(axes).intersection(self._mesh.axes)


def _combinations(mesh: Mesh) -> Iterator[frozenset[Axis]]:
    """Yields the sets of axes along which ranks share states (what parameters of their own leave), or exchange data."""
    apart = [axis for axis in mesh.axes if axis.own_parameters]
    for count in range(len(apart) + 1):
        for own in itertools.combinations(apart, count):
            yield frozenset(mesh.axes).difference(own)
    yield from (frozenset((axis,)) for axis in apart)
