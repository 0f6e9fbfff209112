"""`lightning-ptm inspect`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

from pathlib import Path

from lightning_ptm.config import format_bytes
from lightning_ptm.progress import Progress
from lightning_ptm.storage.contents import describe
from lightning_ptm.storage.source import Source


def inspect(checkpoint: Path, *, verify: bool = True, weights_only: bool = True) -> None:
    """Print what is in a checkpoint, and compare its bytes with their checksums.

    Ends with status 1 where they differ, or where there is no checkpoint that can be read.

    Args:
        checkpoint: a sharded checkpoint (a folder), or a full one (a file).
        verify: read all of it to compare checksums; false reads names and sizes only.
        weights_only: false loads a checkpoint with objects of any class, which can run code: only for one that you trust.
    """
    source = Source(checkpoint, weights_only=weights_only)
    print(describe(source))
    print()
    if not verify:
        print("not verified")
    elif not source.has_checksums:
        print("it opens, and cannot be verified further: it was saved without checksums")
    else:
        with Progress().bar("verify", source.size_bytes) as seen:
            source.check(seen)
        files = 1 + len(source.files)
        size = f"{format_bytes(source.size_bytes)} in {files} file{'s' * (files > 1)}"
        if source.sealed:
            print(f"verified: {size}, all as written by one save")
        elif source.index is not None:
            print(
                f"verified: {size}, elements as written; format version {source.index.version} has no checksum of names and "
                f"of what belongs together: load the checkpoint and save it again to have one"
            )
        else:
            print(f"verified: {size}, elements and Lightning's dictionary as written")
