"""The communicators of one run, by the axes of its mesh.

Owns which of them is among whom. Knows axes and their sizes, not what ranks do along them.

I1: along axes that reach all ranks is the communicator of all; a rank that is alone along its axes has one of its own.
I2: all of them are made at the start, in the same order on all ranks; later, asking makes none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning_ptm.comm.background_group import BackgroundGroup
from lightning_ptm.comm.communicator import Communicator, SoloCommunicator
from lightning_ptm.planning.sharding import Axis, Mesh


class Communicators:
    """Whoever differs along some axes alone, by these axes. Collective: process groups are made.

    Args:
        everybody: of all ranks of the mesh; those made here end with it.
        along: the sets of axes that will be asked for, beside all of them; the same on all ranks.
        behind: the axes along which ranks exchange something behind training; the same on all ranks.
    """

    def __init__(
        self,
        mesh: Mesh,
        everybody: Communicator,
        along: Iterable[Collection[Axis]] = (),
        behind: Collection[Axis] = (),
    ) -> None:
        self._mesh = mesh
        self.everybody = everybody
        self._made = {self._wide(mesh.sizes): everybody}
        for axes in along:
            wide = self._wide(axes)
            if wide not in self._made:
                self._made[wide] = everybody.part(mesh.groups(wide)) if wide else SoloCommunicator()
        wide = self._wide(behind)
        self.behind: BackgroundGroup | None = everybody.behind(mesh.groups(wide)) if wide else None
        """Of the ranks that differ from this one along `behind` alone, if there are others."""

    def along(self, axes: Collection[Axis]) -> Communicator:
        """Of the ranks that differ from this one along these axes alone."""
        return self._made[self._wide(axes)]

    def _wide(self, axes: Collection[Axis]) -> frozenset[Axis]:
        """Of some axes, those along which there are others."""
        return frozenset(axis for axis in axes if self._mesh.sizes[axis] > 1)
