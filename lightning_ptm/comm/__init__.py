"""Communication between ranks: collectives over pages, and the agreement of all ranks on the order of collectives."""

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
    RankTeams,
)
from lightning_ptm.comm.communicator import Communicator, SoloCommunicator
from lightning_ptm.comm.mesh import Communicators
from lightning_ptm.comm.process_group import ProcessGroupCommunicator
from lightning_ptm.comm.raise_on_all_ranks import raise_on_all_ranks
from lightning_ptm.comm.setup_barrier import SetupBarrier
from lightning_ptm.comm.user_collectives import UserCollectives
from lightning_ptm.comm.work import Work

__all__ = [
    "DIFFERENT",
    "OTHER_NUMBER",
    "TOGETHER",
    "UNLIKE",
    "Agreement",
    "Boundary",
    "Communicator",
    "Communicators",
    "Gathering",
    "Meeting",
    "NeededCollective",
    "ProcessGroupCommunicator",
    "RankTeams",
    "SetupBarrier",
    "SoloCommunicator",
    "UserCollectives",
    "Work",
    "raise_on_all_ranks",
]
