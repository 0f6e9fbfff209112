"""What a user is told of a path that cannot be read. Knows files and errors, not what is in them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from lightning_ptm.errors import CheckpointError

_HINTS = {
    errno.EACCES: "; give the user of this process the right to read it and to enter its folders",
    errno.EPERM: "; give the user of this process the right to read it and to enter its folders",
    errno.EIO: "; see the system's log for the disk, and use another checkpoint",
}


def unread(path: Path, error: OSError) -> CheckpointError:
    """The system's reason why a file cannot be read, and what to do."""
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}{_HINTS.get(error.errno or 0, '')}")


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name.

    Raises:
        CheckpointError: nobody can know, since one of the folders around it may not be entered.
    """
    return _is(path, stat.S_ISDIR)


def is_file(path: Path) -> bool:
    """Whether there is a file of this name. Raises as `is_folder`."""
    return _is(path, stat.S_ISREG)


def _is(path: Path, wanted: Callable[[int], bool]) -> bool:
    try:
        return wanted(os.stat(path).st_mode)
    except PermissionError as error:
        raise unread(path, error) from error
    except (OSError, ValueError):
        return False
