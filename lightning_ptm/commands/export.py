"""`lightning-ptm export`: a checkpoint's weights as Hugging Face's loaders read them."""

from __future__ import annotations

from pathlib import Path

from lightning_ptm.config import format_bytes
from lightning_ptm.errors import some
from lightning_ptm.progress import Progress
from lightning_ptm.storage import huggingface
from lightning_ptm.storage.source import Source


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_size: str = "5GB",
    strip: str | None = None,
    weights_only: bool = True,
) -> None:
    """Write a checkpoint's weights as safetensors files that `from_pretrained` loads.

    A tensor with several names (tied weights) is written once, under the first of them. Memory does not grow with the
    model, checksums are compared on the way, and the folder appears all at once.

    Args:
        checkpoint: a sharded checkpoint (a folder), or a full one (a file).
        out: the folder to write, new or empty.
        dtype: fp32, bf16 or fp16, for floating point tensors; by default as they were saved.
        shard_size: larger models are written in files of at most this size, with an index.
        strip: take only what is below this name, and leave the name out: `model` where the LightningModule keeps the
            Hugging Face model as self.model.
        weights_only: false loads a checkpoint with objects of any class, which can run code: only for one that you trust.
    """
    wanted = None if dtype is None else huggingface.parse_dtype(dtype)
    source = Source(checkpoint, weights_only=weights_only)
    plan = huggingface.plan(source, dtype=wanted, shard_size=shard_size, strip=strip)
    with Progress().bar("export", plan.size_bytes) as seen:
        infinite = huggingface.write(source, plan, out, seen=seen)
    for name, kept in plan.dropped.items():
        print(f"tied: {name} is {kept}, and written under that name only")
    if plan.left_out:
        print(f"left out, not below {strip}: {some(plan.left_out)}")
    if plan.others:
        print(f"left out, no tensors: {some(plan.others)}")
    if not source.has_checksums:
        print("the checkpoint was saved without checksums, so damage to it would not have been found")
    for name, count in infinite.items():
        print(f"warning: {count} values of {name} are beyond {dtype} and became infinite; bf16 and fp32 reach further")
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in plan.entries})
    files = len(plan.shards)
    print(
        f"{out}: {len(plan.entries)} tensors, {format_bytes(plan.size_bytes)} in {files} file{'s' * (files > 1)}, "
        f"{', '.join(dtypes)}"
    )
