"""Side of a case: runs `lightning-ptm probe` on a number of ranks and returns the rates that it measured.

Options: `folder` on the disk; `ranks`; `quick`. A step is one probe. A turn's extra number is the hardware file that it
wrote.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.race import Baton, end_with_parent


def run(options: dict[str, Any], baton: Baton) -> None:
    """Takes part in the race until it is over."""
    ranks = options["ranks"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--no-python", f"--nproc-per-node={ranks}"]
    installed = str(Path(sys.executable).with_name("lightning-ptm"))
    command = [*(launch if ranks > 1 else []), installed, "probe", "--disk", options["folder"]]
    command += ["--quick"] if options["quick"] else []
    baton.ready()
    while baton.wait():
        answer = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=partial(end_with_parent, signal.SIGTERM)
        )
        baton.report(0.0, {"hardware": yaml.safe_load(answer.stdout)})
