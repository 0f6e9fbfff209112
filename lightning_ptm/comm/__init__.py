"""Collectives over pages, and how ranks agree on their order."""

from lightning_ptm.comm.agreement import (
    DIFFERENT,
    OTHER_NUMBER,
    TOGETHER,
    UNLIKE,
    Agreement,
    Boundary,
    Gathering,
    Meeting,
    NeededCollective,
    Teams,
)
from lightning_ptm.comm.arrivals import Arrivals
from lightning_ptm.comm.communicator import Communicator, SoloCommunicator
from lightning_ptm.comm.foreign import ForeignCollectives
from lightning_ptm.comm.mesh import Communicators
from lightning_ptm.comm.process_group import ProcessGroupCommunicator
from lightning_ptm.comm.together import together
from lightning_ptm.comm.work import Work

__all__ = [
    "DIFFERENT",
    "TOGETHER",
    "OTHER_NUMBER",
    "UNLIKE",
    "Agreement",
    "Arrivals",
    "Boundary",
    "Communicator",
    "Communicators",
    "ForeignCollectives",
    "Gathering",
    "Meeting",
    "NeededCollective",
    "ProcessGroupCommunicator",
    "SoloCommunicator",
    "Teams",
    "Work",
    "together",
]
