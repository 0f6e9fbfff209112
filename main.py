"""The command line in a checkout: `python main.py fit --config gpt.yaml` is `lightning-ptm fit --config gpt.yaml`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import lightning_ptm
from lightning_ptm.cli import main

if importlib.util.find_spec("lightning_ptm.callbacks") is None:
    # In a checkout that is not installed as editable, callbacks/ is not mapped into the package yet.
    lightning_ptm.__path__.append(str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    main()
