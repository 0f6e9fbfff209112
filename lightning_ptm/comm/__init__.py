"""Collectives over pages, and how ranks agree on their order."""

from lightning_ptm.comm.agreement import Agreement, Boundary, Request
from lightning_ptm.comm.communicator import Communicator, ProcessGroupCommunicator, SoloCommunicator, Work
from lightning_ptm.comm.together import together

__all__ = [
    "Agreement",
    "Boundary",
    "Communicator",
    "ProcessGroupCommunicator",
    "Request",
    "SoloCommunicator",
    "Work",
    "together",
]
