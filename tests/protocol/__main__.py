"""The command line of ``scripts/protocol``."""

import argparse
import sys
import time

from tests.protocol.cases import EXHAUSTIVE, LARGE, RANDOM
from tests.protocol.driver_states import silence
from tests.protocol.ranks import Violation


def main():
    parser = argparse.ArgumentParser(prog="scripts/protocol", description="Search the states of small elastic jobs.")
    parser.add_argument("case", choices=[*EXHAUSTIVE, *LARGE, *RANDOM, "all"], help="which job")
    parser.add_argument("--states", type=int, default=10**7, help="the most states of a search (default: 10,000,000)")
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
        if name in RANDOM:
            found = RANDOM[name].walk(arguments.seed, arguments.ways)
        else:
            found = (EXHAUSTIVE | LARGE)[name].search(arguments.states, is_reduced=not arguments.full)
    except Violation as violation:
        print(f"{name}: FAILED: {violation}")  # noqa: T201
        return 1
    print(f"{name}: {time.monotonic() - begin:.0f} s: {found}", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
