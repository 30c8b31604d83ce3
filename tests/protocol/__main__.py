"""The command line of ``scripts/protocol``."""

import argparse
import sys
import time
from pathlib import Path

from tests.protocol.cases import EXHAUSTIVE, LARGE, RANDOM
from tests.protocol.driver_states import silence
from tests.protocol.ranks import Violation
from tests.protocol.saves import OtherSearchError


def main():
    parser = argparse.ArgumentParser(prog="scripts/protocol", description="Search the states of small elastic jobs.")
    parser.add_argument("case", choices=[*EXHAUSTIVE, *LARGE, *RANDOM, "all"], help="which job")
    parser.add_argument("--states", type=int, default=10**7, help="the most states of a search (default: 10,000,000)")
    parser.add_argument("--save", metavar="FOLDER", help="keep the search there, and go on with one that is there")
    parser.add_argument("--full", action="store_true", help="search also the states that are like others")
    parser.add_argument("--ways", type=int, default=10**4, help="how many random ways (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random ways (default: 0)")
    arguments = parser.parse_args()
    silence()
    names = [*EXHAUSTIVE, *RANDOM] if arguments.case == "all" else [arguments.case]
    return max([_run(name, arguments) for name in names])


def _run(name, arguments):
    begin = time.monotonic()
    try:
        found = _walked(name, arguments) if name in RANDOM else _searched(name, arguments)
    except (Violation, OtherSearchError) as error:
        print(f"{name}: FAILED: {error}")  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted{'; the same command goes on' if arguments.save else ''}")  # noqa: T201
        return 130
    print(f"{name}: {time.monotonic() - begin:.0f} s: {found}", flush=True)  # noqa: T201
    return 0


def _walked(name, arguments):
    return RANDOM[name].walk(arguments.seed, arguments.ways)


def _searched(name, arguments):
    folder = Path(arguments.save) / name.replace(" ", "-") if arguments.save else None
    case = (EXHAUSTIVE | LARGE)[name]
    return case.search(arguments.states, is_reduced=not arguments.full, folder=folder, tell=_tell)


def _tell(line):
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
