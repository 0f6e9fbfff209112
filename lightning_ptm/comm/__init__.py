"""Collectives over pages, and how ranks agree on their order."""

from lightning_ptm.comm.agreement import Agreement, Boundary, Meeting, Request, Teams
from lightning_ptm.comm.communicator import Communicator, ProcessGroupCommunicator, SoloCommunicator, Work
from lightning_ptm.comm.together import together

__all__ = [
    "Agreement",
    "Boundary",
    "Communicator",
    "Meeting",
    "ProcessGroupCommunicator",
    "Request",
    "SoloCommunicator",
    "Teams",
    "Work",
    "together",
]
