"""How long it takes until something starts, in CPU seconds of a process of its own: medians, both sides interleaved.

    python benchmarks/start.py --rounds 5

Prints what the command line's answers cost, and `import lightning_ptm` beside `import lightning.pytorch` alone.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    **{
        f"lightning-ptm {line}": ["-c", "from lightning_ptm.cli import main; main()", *line.split()]
        for line in ("--help", "--version", "plan --help", "inspect --help", "export --help", "fit --help")
    },
    "import lightning.pytorch": ["-c", "import lightning.pytorch"],
    "import lightning.pytorch, lightning_ptm": ["-c", "import lightning.pytorch, lightning_ptm"],
    "import lightning_ptm": ["-c", "import lightning_ptm"],
    "from lightning_ptm import AngelPTMStrategy": ["-c", "from lightning_ptm import AngelPTMStrategy"],
}


def cpu_s(arguments: list[str]) -> float:
    """CPU seconds of a Python process with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures all of them in turn, so many rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    taken = {name: [cpu_s(arguments)] for name, arguments in COMMANDS.items()}  # and files come into the page cache
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            taken[name].append(cpu_s(arguments))
    medians = {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}
    for name, median in medians.items():
        print(f"{median:7.2f} s  {name}  ({min(taken[name]):.2f} to {max(taken[name]):.2f})")
    alone = medians["import lightning.pytorch"]
    both = medians["import lightning.pytorch, lightning_ptm"]
    print(
        f"import lightning_ptm adds {both - alone:+.2f} s to import lightning.pytorch alone: ratio {both / alone:.3f}"
    )
    print(f"lightning-ptm --help takes {medians['lightning-ptm --help'] / alone:.3f} of import lightning.pytorch")


if __name__ == "__main__":
    main()
