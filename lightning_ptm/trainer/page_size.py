"""`page_size="auto"`: the smallest page that saturates the links (section 4.1), measured where the run is to be."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info

from lightning_ptm.comm import Communicator
from lightning_ptm.config import DEFAULT_PAGE_BYTES, Settings, format_bytes
from lightning_ptm.errors import AngelPTMError, RankError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.memory.disk import check_folders
from lightning_ptm.memory.page_rates import measured_rates, smallest_saturating


def chosen_page_bytes(settings: Settings, communicator: Communicator, backend: Backend) -> int:
    """What rank 0 finds, on all ranks. Collective.

    Raises:
        ConfigError: rank 0 cannot use the disk's folders; RankError on the others.
    """
    failure: AngelPTMError | None = None
    told: int | str | None = None
    if communicator.rank == 0:
        try:
            check_folders(settings.disk_paths)
            told = smallest_saturating(measured_rates(settings.disk_paths, backend)) or DEFAULT_PAGE_BYTES
        except AngelPTMError as error:
            failure, told = error, str(error)
    told = communicator.broadcast_object(told)
    if failure is not None:
        raise failure
    if not isinstance(told, int):
        raise RankError(
            f"page_size='auto', and rank 0 could not measure pages: {told}; mend that, or give a size, such as '4MiB'"
        )
    rank_zero_info(f"page_size='auto': pages of {format_bytes(told)}")
    return told
