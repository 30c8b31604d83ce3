"""``hvdrun -np 2 python train.py``: a command on several processes, from the shell."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from executors.api import CommandNotFoundError, ExecutorError, WorkerError
from executors.arguments import SECONDS
from executors.local.command import LocalOptions, resolve_start_timeout, run_command
from executors.local.output import say
from hvd_cluster import __version__, horovod

__all__ = ["main"]

USAGE_ERROR = 2
NOT_FOUND = 127
# A shell says 128 + n for a command that signal n ended.
BY_SIGNAL = 128
SHOWN_LINES = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process; returns the exit status.

    The status is that of the worker that caused the failure, or 128 + n if signal n killed it; 2 for an invalid command
    line and 127 for a command that does not exist. Raises SystemExit for the former, and for ``--version``.
    """
    arguments = _parse(argv)
    with _signals_raise(), _log_shown():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        run_command(arguments.command, arguments.num_proc, _options(arguments))
    except CommandNotFoundError as error:
        return _fail(error, NOT_FOUND)
    except WorkerError as error:
        return _fail(_explain(error), _status(error.exit_code))
    except BrokenPipeError:
        # The reader of standard output is gone. Python would complain when it flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BY_SIGNAL + signal.SIGPIPE
    except (ExecutorError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; the ranks were ended", BY_SIGNAL + signal.SIGINT)
    return 0


def _explain(error: WorkerError) -> str:
    text, shown = f"{error}; the other ranks were ended", error.last_lines[-SHOWN_LINES:]
    if not shown:
        return text
    return "\n    ".join([f"{text}. The last lines of its standard error:", *shown])


def _fail(error: object, status: int) -> int:
    say(str(error))
    return status


def _status(exit_code: int | None) -> int:
    if exit_code is None:
        return 1
    return exit_code if exit_code >= 0 else BY_SIGNAL - exit_code


def _options(arguments: argparse.Namespace) -> LocalOptions:
    return LocalOptions(
        environment=_environment(arguments.horovod_alias),
        start_timeout=arguments.start_timeout,
        output_directory=arguments.output_filename,
        timestamp=arguments.prefix_output_with_timestamp,
        verbose=arguments.verbose,
    )


def _environment(horovod_alias: bool) -> dict[str, str]:
    return {"PYTHONPATH": horovod.search_path(os.environ.get("PYTHONPATH"))} if horovod_alias else {}


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that the workers are ended in good order.

    An ignored signal, such as SIGHUP under nohup, stays ignored.
    """
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Console(logging.Handler):
    """Writes each record as a line with the name hvdrun."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except OSError:
            self.handleError(record)


@contextmanager
def _log_shown() -> Iterator[None]:
    """Show the log of the launcher on standard error, from level INFO up."""
    log, console = logging.getLogger("executors"), _Console()
    level = log.level
    log.addHandler(console)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(console)
        log.setLevel(level)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(BY_SIGNAL + number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="hvdrun",
        usage="%(prog)s -np N [options] command [argument ...]",
        description="Run a command on N processes of this host that train together.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=_count, metavar="N", help="number of processes")
    add("-n", dest="num_proc", type=_joined_count, help=argparse.SUPPRESS)
    add("-v", "--version", action="version", version=__version__, help="print the version and exit")
    add("--verbose", action="store_true", help="log the process id of each rank")
    add(
        "--start-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="longest time for the processes to start; HOROVOD_START_TIMEOUT or 30 by default. It does not limit the "
        "time before init()",
    )
    add(
        "--output-filename",
        metavar="FOLDER",
        help="also write the output of the processes to FOLDER/rank.<rank>/stdout and stderr, without prefixes",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the time before each line that the processes write",
    )
    add(
        "--horovod-alias",
        action="store_true",
        help="run a script that was written for Horovod: its import horovod.torch gives hvd_cluster.torch",
    )
    add("command", nargs=argparse.REMAINDER, help="the command that each process runs")
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if not arguments.command:
        parser.error("there is no command; put it last, as in: hvdrun -np 2 python train.py")
    if arguments.num_proc is None:
        parser.error("the number of processes is missing, as in: hvdrun -np 2 python train.py")
    try:
        arguments.start_timeout = resolve_start_timeout(arguments.start_timeout)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def _joined_count(text: str) -> int:
    """The count in ``-np2``, which argparse reads as ``-n`` with the value ``p2``."""
    if not text.startswith("p"):
        raise argparse.ArgumentTypeError(f"there is no such option; say -np {text}")
    return _count(text[1:])


def _seconds(text: str) -> float:
    try:
        return resolve_start_timeout(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be {SECONDS}") from None


if __name__ == "__main__":
    sys.exit(main())
