"""The command line of ``scripts/fuzz``."""

import argparse
import random
import sys
import time

from tests.fuzz.parsers import PARSERS, UnreadableError, search
from tests.fuzz.ports import run


def main():
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Bad inputs for parsers, and for ports of a job.")
    parser.add_argument("what", choices=["parsers", "ports", *PARSERS], help="all parsers, one, or the ports of a job")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many, for each parser (default: 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument("--rate", type=int, default=400, help="connections a second, for ports (default: 400)")
    arguments = parser.parse_args()
    if arguments.what == "ports":
        for name, value in run(arguments.seed, arguments.inputs, arguments.rate).items():
            print(f"{name}: {value}", flush=True)  # noqa: T201
        return 0
    return max([_search(name, arguments) for name in (PARSERS if arguments.what == "parsers" else [arguments.what])])


def _search(name, arguments):
    begin = time.monotonic()
    try:
        taken = search(name, random.Random(f"{name} {arguments.seed}"), arguments.inputs)
    except UnreadableError as failure:
        print(f"FAILED: {failure}", flush=True)  # noqa: T201
        return 1
    print(f"{name}: {arguments.inputs} inputs, {taken} taken, {time.monotonic() - begin:.0f} s", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
