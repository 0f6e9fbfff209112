"""The command line: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks import tables
from benchmarks.cases import CASES, OF_README, OF_VERSIONS
from benchmarks.environments import install_deepspeed
from benchmarks.runner import Wanted, against, run


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, yaml.safe_load(value)


def _case(text: str) -> str:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f"there is no case {text!r}; python -m benchmarks list")
    return text


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures this project against others.")
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names all cases")
    some = commands.add_parser("run", help="runs cases and writes their rows of LOG.md")
    some.add_argument("cases", nargs="+", metavar="CASE", type=_case)
    some.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="of the strategy")
    some.add_argument("--sides", default="", help="only these, by comma")
    versions = commands.add_parser("versions", help="compares our side of cases with another commit's")
    versions.add_argument("commit")
    versions.add_argument("cases", nargs="*", metavar="CASE", type=_case, help=f"default: {' '.join(OF_VERSIONS)}")
    readme = commands.add_parser("readme", help="runs the cases of README.md, and puts LOG.md's figures into the pages")
    readme.add_argument("--print", action="store_true", help="prints the tables, and changes no page")
    readme.add_argument("--no-run", action="store_true", help="takes LOG.md as it is")
    for each in (some, versions, readme):
        each.add_argument("--quick", action="store_true", help="tiny sizes, one repeat: shows that a case runs")
        each.add_argument("--repeats", type=int, help="turns of each side, in place of the case's own")
        each.add_argument("--disk-path", type=Path, help="folder on the disk to measure (default: beside the checkout)")
        each.add_argument("--no-log", action="store_true", help="leaves LOG.md as it is")
    deepspeed = commands.add_parser(
        "install-deepspeed", help="makes DeepSpeed's environment, and compiles its operators"
    )
    deepspeed.add_argument("requirement", nargs="?", default="deepspeed", help="for pip: deepspeed==0.19.8")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    args = parser().parse_args(arguments)
    if args.command == "list":
        for case in CASES.values():
            print(
                f"{case.id:28} {case.what}{f', {case.tokens_per_step} tokens a step' if case.tokens_per_step else ''}"
            )
        return 0
    if args.command == "install-deepspeed":
        install_deepspeed(args.requirement)
        print("its operators are compiled in its first run, which takes minutes:", flush=True)
        return not run([CASES["deepspeed-124M"]], Wanted(quick=True, sides=("deepspeed-pipe",)))
    wanted = Wanted(
        quick=args.quick,
        repeats=args.repeats,
        settings=dict(getattr(args, "set", [])),
        sides=tuple(filter(None, getattr(args, "sides", "").split(","))),
        log=not args.no_log,
        **({"disk": args.disk_path} if args.disk_path else {}),
    )
    if args.command == "run":
        return not run([CASES[name] for name in args.cases], wanted)
    if args.command == "versions":
        return not run([against(CASES[name], args.commit) for name in args.cases or OF_VERSIONS], wanted)
    done = args.no_run or run([CASES[name] for name in OF_README], wanted)
    if args.print:
        print(tables.of_readme())
    elif not args.quick:
        tables.write()
    return not done


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the processes of sides are ended
    raise SystemExit(main())
