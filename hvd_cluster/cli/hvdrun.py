"""``hvdrun -np 2 python train.py``: a command on several processes, from the shell."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import NoReturn

from collectives import LOG_LEVELS, descriptors
from executors import WRITTEN as ELASTIC
from executors import (
    Address,
    CommandNotFoundError,
    DiscoveryError,
    ElasticArguments,
    ExecutorError,
    WorkerError,
    allocation_of,
    heeded,
    interface_variables,
    release_consoles,
    resolve_grace,
    resolve_limits,
    say,
    with_last_lines,
)
from executors.agents.hosts import HostsOptions, PlaceArguments, Places, resolve_start_timeout, run_command
from executors.agents.mpi import WITHOUT_PAGE
from hvd_cluster import horovod
from hvd_cluster.cli.by_mpi import OURS, ForeignLaunch, check_controller
from hvd_cluster.cli.command_line import USAGE_ERROR, CommandLine, read_command_line
from hvd_cluster.cli.flags import variables

Launch = Callable[[], int]
"""Runs a job; returns its exit code, negative for a signal."""

NOT_FOUND = 127
# A shell says 128 + n for a command that signal n ended.
BY_SIGNAL = 128
LEAVING = (signal.SIGTERM, signal.SIGHUP)
"""The signals that raise an exception, as Ctrl-C does, so that the workers are ended in good order."""
# How each argument is written here.
WRITTEN = {name: f"--{name.replace('_', '-')}" for name in (option.name for option in fields(PlaceArguments))}
WRITTEN |= {"hosts": "-H", "slots": "--slots-per-host", "ssh_port": "-p", "ssh_identity_file": "-i"}
WRITTEN |= {name: f"--{name.replace('_', '-')}" for name in ELASTIC}
WRITTEN |= {"num_proc": "-np", "min_num_proc": "--min-np", "max_num_proc": "--max-np"}
WRITTEN |= {"cooldown_range": "--blacklist-cooldown-range"}
LOGS = {
    "executors": logging.NOTSET,
    "collectives.store": logging.WARNING,
    "collectives.net": logging.WARNING,
}
"""The loggers of the launcher and of the servers in its process, each with the lowest level to show."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process; returns the exit status.

    The status is that of the worker that caused the failure, or 128 + n if signal n killed it; 127 for a command that
    does not exist. Raises SystemExit for an invalid command line, with status 2, and for ``--version`` and the like.
    """
    line = read_command_line(argv)
    launch = _launch(line)
    try:
        with descriptors.raised_limit(), heeded(LEAVING, _leave), _log_shown(line["log_level"] or "INFO"):
            return _run(launch)
    finally:
        release_consoles()


def horovodrun() -> int:
    """The command ``horovodrun``, which another distribution installs: ``hvdrun --horovod-alias``."""
    return main(["--horovod-alias", *sys.argv[1:]])


def _run(launch: Launch) -> int:
    try:
        return _status(launch())
    except DiscoveryError as error:
        return _fail(error, USAGE_ERROR)
    except CommandNotFoundError as error:
        return _fail(error, NOT_FOUND)
    except WorkerError as error:
        text = with_last_lines(f"{error}; the other ranks were ended", error.last_lines)
        return _fail(text, _status(error.exit_code))
    except (ExecutorError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted; the ranks were ended", BY_SIGNAL + signal.SIGINT)


def _fail(error: object, status: int) -> int:
    say(str(error))
    return status


def _status(exit_code: int | None) -> int:
    if exit_code is None:
        return 1
    return exit_code if exit_code >= 0 else BY_SIGNAL - exit_code


class _Console(logging.Handler):
    """Writes each record as a line with the name hvdrun."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def _log_shown(level: str) -> Iterator[None]:
    """Show LOGS on standard error, from ``level`` up."""
    logs, console = [logging.getLogger(name) for name in LOGS], _Console()
    before = [log.level for log in logs]
    for log in logs:
        log.addHandler(console)
        log.setLevel(max(LOG_LEVELS[level.lower()], LOGS[log.name]))
    try:
        yield
    finally:
        for log, own in zip(logs, before, strict=True):
            log.removeHandler(console)
            log.setLevel(own)


def _leave(number: int) -> NoReturn:
    raise SystemExit(BY_SIGNAL + number)


def _launch(line: CommandLine) -> Launch:
    try:
        check_controller(line)
        return _ours(line) if line.controller == OURS else _foreign(line)
    except ValueError as error:
        line.fail(str(error))


def _ours(line: CommandLine) -> Launch:
    given = _place_arguments(line).within(allocation_of(os.environ))
    given.check(WRITTEN)
    limits = resolve_limits(line["num_proc"], _elastic(line, given), WRITTEN)
    options = _options(line, Places.of(given, limits.size, limits.is_elastic))

    def launch() -> int:
        run_command(line.command, limits, options)
        return 0

    return launch


def _foreign(line: CommandLine) -> Launch:
    # jsrun knows the hosts of its job, with all of their cores.
    allocation = allocation_of(os.environ) if line.controller == "mpi" else None
    given = _place_arguments(line).within(allocation)
    given.check(WRITTEN)
    hosts = Places.of(given, line["num_proc"], False).hosts
    seconds = line["start_timeout"]
    patience = {} if seconds is None else {"HOROVOD_START_TIMEOUT": f"{seconds:g}"}
    launch = ForeignLaunch.of(line, hosts, _environment(line) | patience)
    if _dashboard(line) is not None:
        say(WITHOUT_PAGE.format(launch.launcher))
    return launch.run


def _place_arguments(line: CommandLine) -> PlaceArguments:
    values = {option.name: line[option.name] for option in fields(PlaceArguments) if option.name != "slots"}
    return PlaceArguments(**values, slots=line["slots_per_host"])


def _elastic(line: CommandLine, given: PlaceArguments) -> ElasticArguments:
    limits = line["min_np"], line["max_np"], line["reset_limit"], line["elastic_timeout"]
    has_limits = line["min_np"] is not None or line["max_np"] is not None
    has_discovery = given.host_discovery_script is not None or (has_limits and given.names_hosts)
    return ElasticArguments(*limits, line["blacklist_cooldown_range"], has_discovery)


def _options(line: CommandLine, places: Places) -> HostsOptions:
    return HostsOptions(
        environment=_environment(line),
        start_timeout=resolve_start_timeout(line["start_timeout"]),
        grace=resolve_grace(line["grace_seconds"]),
        output_directory=line["output_filename"],
        timestamp=bool(line["prefix_output_with_timestamp"]),
        verbose=bool(line["verbose"]),
        discovery=places.discovery,
        hosts=places.hosts,
        shell=places.shell,
        dashboard=_dashboard(line),
    )


def _dashboard(line: CommandLine) -> Address | None:
    """Where the live page is served; None for no page."""
    is_wanted = line["dashboard"]
    if is_wanted is None:
        is_wanted = line["dashboard_address"] is not None
    return (line["dashboard_address"] or Address()) if is_wanted else None


def _environment(line: CommandLine) -> dict[str, str]:
    alias = {"PYTHONPATH": horovod.search_path(os.environ.get("PYTHONPATH"))} if line["horovod_alias"] else {}
    return {**variables(line.values), **interface_variables(line["network_interfaces"] or ()), **alias}


if __name__ == "__main__":
    sys.exit(main())
