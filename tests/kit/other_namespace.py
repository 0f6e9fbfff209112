"""A copy of the tests for `pytorch_lightning`: their imports are renamed as those of lightning_ptm are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lightning_ptm.pytorch_lightning import renamed

TESTS = Path(__file__).parents[1]
_ONLY_IN_TESTS = (
    (re.compile(r"(?m)^( *import| *from) lightning\b(?!\.)"), r"\1 pytorch_lightning"),
    (re.compile(r"\bL\.pytorch\."), "L."),
    (re.compile(r"(?m)^( *)from callbacks\b"), r"\1from lightning_ptm.pytorch_lightning.callbacks"),
    (re.compile(r"\blightning_ptm\.(?=AngelPTM)"), "lightning_ptm.pytorch_lightning."),
)


def copy_renamed(folder: Path) -> None:
    """Writes the tests, and the settings of pytest, into a folder."""
    for path in TESTS.rglob("*.py"):
        text = renamed(path.read_text())
        for pattern, replacement in _ONLY_IN_TESTS:
            text = pattern.sub(replacement, text)
        copy = folder / "tests" / path.relative_to(TESTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    shutil.copy(TESTS.parent / "pyproject.toml", folder)
