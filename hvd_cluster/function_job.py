"""``run()``: a function on several processes, from Python."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from executors import (
    Address,
    Call,
    ElasticArguments,
    Limits,
    ResetLimit,
    allocation_of,
    check_integer,
    check_variables,
    interface_names,
    interface_variables,
    parse_host_list,
    pickle_call,
    renamed,
    resolve_grace,
    resolve_limits,
)
from executors.agents.hosts import HOST, HostsOptions, PlaceArguments, Places, resolve_start_timeout, run_function
from executors.agents.mpi import WITHOUT_PAGE, MpiJob, MpiOptions, run_function_by_mpi
from hvd_cluster import numpy_for_mxnet
from hvd_cluster.cli.values import words

logger = logging.getLogger(__name__)
numpy_for_mxnet.register()


LARGEST_PORT = 65535


def check_controller(use_gloo: object, use_mpi: object, mpi_args: object, for_ours: Mapping[str, object]) -> None:
    """Raise ValueError for arguments that contradict each other."""
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi contradict each other: give only one of them")
    if mpi_args is not None and not use_mpi:
        raise ValueError(f"mpi_args is {mpi_args!r}, but is for use_mpi=True; give both, or leave it out")
    given = next((name for name, value in for_ours.items() if use_mpi and value is not None), "")
    if given:
        text = f"{given} is for processes that run() starts itself, and use_mpi lets mpirun start them"
        raise ValueError(f"{text}; leave out one of the two")


def mpi_words(mpi_args: object) -> tuple[str, ...]:
    """The words in a text for mpirun; none for None."""
    if mpi_args is None:
        return ()
    try:
        if isinstance(mpi_args, str):
            return words(mpi_args)
        problem = "arguments as in a shell, in one text"
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"mpi_args is {mpi_args!r}, but must be {problem}")


def read_hosts(text: object) -> dict[str, int] | None:
    """The hosts in ``text``, with their slots; None for None."""
    if text is None:
        return None
    try:
        return parse_host_list(text if isinstance(text, str) else "")
    except ValueError as error:
        form = "must be hosts with their slots, such as 'node1:4,node2:4'"
        raise ValueError(f"hosts is {text!r}, but {form}; {error}") from None


def read_port(given: object) -> int | None:
    """The port of ssh; None for None."""
    if given is None:
        return None
    number = check_integer(given, "ssh_port", 1)
    if number > LARGEST_PORT:
        raise ValueError(f"ssh_port is {number}, but must be at most {LARGEST_PORT}")
    return number


def read_script(given: object) -> str | None:
    """The program that prints the hosts; None for None."""
    if given is not None and (not isinstance(given, str) or not given.strip()):
        raise ValueError(f"host_discovery_script is {given!r}, but must be a program, or a line for the shell")
    return given


def read_interfaces(nics: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names of network interfaces, also out of a text with commas; none for None."""
    return interface_names(nics.split(",") if isinstance(nics, str) else nics)


WRITTEN = {option.name: option.name for option in fields(PlaceArguments)}
T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: ResetLimit = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | Path | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | Path | None = None,
    disable_cache: bool | None = None,
    output_filename: str | Path | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Iterable[str] | None = None,
    network_interfaces: str | Iterable[str] | None = None,
    executable: str | os.PathLike[str] | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    remote_shell: str | None = None,
    elastic_timeout: float | None = None,
    grace_seconds: float | None = None,
    env: Mapping[str, str] | None = None,
    dashboard: bool | str = False,
) -> list[T]:
    """Run ``func(*args, **kwargs)`` on ``num_proc`` processes; return the results by rank.

    The output of the processes appears here, each line after ``[rank]<stdout>:`` or ``[rank]<stderr>:``; with
    ``use_mpi``, after what mpirun writes there. The first process that fails ends the others.

    Args:
        func: the function; it travels by cloudpickle, so it may be a lambda, a closure or a part of the main script.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of processes, at least 1; None means ``min_num_proc``, or else 1.
        min_num_proc: the fewest processes that an elastic job goes on with; None means ``num_proc``.
        max_num_proc: the most processes of an elastic job; None means ``num_proc``, or as many as the discovered hosts
            have slots.
        slots: slots of a host for which the script prints no number.
        reset_limit: the most failures and resizes together, or of each, as {"failures": 3, "resizes": 10}; None means
            any number.
        cooldown_range: the shortest and the longest time, in seconds, for which a host with a failed process gets no
            new one; None means for ever.
        hosts: hosts with their slots, such as ``"node1:4,node2:4"``, which get ranks in this order; None: this host.
        hostfile: a file with a line ``node1 slots=4`` for each host.
        host_discovery_script: a program that prints a line ``host:slots`` for each host, and runs every second.
        start_timeout: seconds that the processes may take to come up; None means HOROVOD_START_TIMEOUT, or else 30.
        ssh_port: the port of ssh on other hosts.
        ssh_identity_file: the key file for ssh.
        disable_cache: no effect, as there is no cache of checks here.
        output_filename: a folder for the files ``rank.<rank>/stdout`` and ``rank.<rank>/stderr``; made if needed.
        verbose: true to see on standard error which process is which rank.
        use_gloo: true: without MPI, as by default.
        use_mpi: true: the ``mpirun`` on the PATH starts the processes, as for ``hvdrun --mpi``; not for elastic jobs.
        mpi_args: more arguments for ``mpirun``, in one text.
        network_interface: old name of ``network_interfaces``.
        network_interfaces: network interfaces for the traffic between hosts: names, or a text with commas.
        executable: the Python of the processes; None means this one. It must be able to import hvd_cluster.
        np, min_np, max_np: old names of ``num_proc``, ``min_num_proc``, ``max_num_proc``.
        remote_shell: a command that runs ``sh`` on another host, such as ``"ssh {host}"``, with the name of the host in
            the place of ``{host}``; None: ssh for hosts that are given, no other hosts for those of a script.
        elastic_timeout: seconds to wait for enough processes; None means HOROVOD_ELASTIC_TIMEOUT, or else 600.
        grace_seconds: seconds that a process has to end, or to hand over, after it was asked to; then it is killed.
            None means HOROVOD_GRACE_SECONDS, or else 5.
        env: variables to add to the environment of the processes, or to replace in it.
        dashboard: true for a live page of the job, whose link is printed, on this host; or its address and port, such
            as ``"0.0.0.0:8265"``. With ``use_mpi`` there is none, and a warning says so.

    Raises:
        ValueError: an argument has a value that is not allowed; nothing was started.
        TypeError: ``func`` or an argument cannot be called or pickled, as the text says; nothing was started.
        CommandNotFoundError: there is no such ``executable``, or no ``mpirun``; nothing was started.
        StartTimeoutError: a process did not come up in time.
        ExecutorError: the host discovery script failed at the start, too few processes were there for too long, or
            ``mpirun`` failed.
        WorkerError: a process died, or called ``sys.exit``, or its result cannot be pickled.
        Exception: an exception of ``func``, as itself; its ``__cause__`` is a RemoteError with rank and traceback.
    """
    for_ours = {
        **{"min_num_proc": min_num_proc, "max_num_proc": max_num_proc, "min_np": min_np, "max_np": max_np},
        **{"slots": slots, "reset_limit": reset_limit, "cooldown_range": cooldown_range},
        **{"host_discovery_script": host_discovery_script, "elastic_timeout": elastic_timeout},
        **{"remote_shell": remote_shell, "grace_seconds": grace_seconds},
    }
    check_controller(use_gloo, use_mpi, mpi_args, for_ours)
    given = _places(hosts, hostfile, host_discovery_script, slots, remote_shell, ssh_port, ssh_identity_file)
    size = renamed("num_proc", num_proc, "np", np)
    least = renamed("min_num_proc", min_num_proc, "min_np", min_np)
    most = renamed("max_num_proc", max_num_proc, "max_np", max_np)
    limits = _limits(size, ElasticArguments(least, most, reset_limit, elastic_timeout, cooldown_range), given)
    places = Places.of(given, limits.size, limits.is_elastic)
    nics = renamed("network_interfaces", network_interfaces, "network_interface", network_interface)
    interfaces = read_interfaces(nics)
    options = HostsOptions(
        environment=interface_variables(interfaces) | check_variables(env, "env", "run()"),
        start_timeout=resolve_start_timeout(start_timeout),
        output_directory=output_filename,
        verbose=bool(verbose),
        discovery=places.discovery,
        hosts=places.hosts,
        shell=places.shell,
        dashboard=Address.of(dashboard),
    )
    python = os.fspath(executable or sys.executable)
    if use_mpi:
        by_mpi = _mpi_options(options, start_timeout is not None, python)
        job = _mpi_job(options.hosts or {HOST: limits.size}, interfaces, given, output_filename, mpi_args)
        return cast("list[T]", run_function_by_mpi(pickle_call(Call.of(func, args, kwargs)), job, by_mpi))
    options = replace(options, grace=resolve_grace(grace_seconds))
    return cast("list[T]", run_function(pickle_call(Call.of(func, args, kwargs)), limits, options, python))


def _places(
    hosts: object,
    hostfile: str | Path | None,
    script: object,
    slots: object,
    remote_shell: str | None,
    ssh_port: object,
    ssh_identity_file: str | Path | None,
) -> PlaceArguments:
    """Where the processes may run, also as the launcher around this process says."""
    given = PlaceArguments(
        hosts=read_hosts(hosts),
        hostfile=hostfile,
        host_discovery_script=read_script(script),
        slots=None if slots is None else check_integer(slots, "slots", 1),
        remote_shell=remote_shell,
        ssh_port=read_port(ssh_port),
        ssh_identity_file=ssh_identity_file,
    )
    given = given.within(allocation_of(os.environ))
    given.check(WRITTEN)
    return given


def _limits(size: int | None, elastic: ElasticArguments, given: PlaceArguments) -> Limits:
    """The limits of the job. An elastic one finds hosts by a script, or among those that are named."""
    has_discovery = given.host_discovery_script is not None or (elastic.is_elastic and given.names_hosts)
    number = 1 if size is None and elastic.least is None else size
    return resolve_limits(number, replace(elastic, has_discovery=has_discovery))


def _mpi_options(options: HostsOptions, has_patience: bool, python: str) -> MpiOptions:
    """The ``options`` that mpirun has a place for. With ``has_patience`` the ranks learn the start timeout, too."""
    if options.dashboard is not None:
        logger.warning(WITHOUT_PAGE.format("mpirun"))
    patience = {"HOROVOD_START_TIMEOUT": f"{options.start_timeout:g}"} if has_patience else {}
    return MpiOptions({**options.environment, **patience}, options.start_timeout, options.verbose, python)


def _mpi_job(
    hosts: Mapping[str, int],
    nics: tuple[str, ...],
    given: PlaceArguments,
    output: str | Path | None,
    mpi_args: str | None,
) -> MpiJob:
    key = given.ssh_identity_file
    return MpiJob(
        command=(),
        hosts=hosts,
        nics=nics,
        ssh_port=given.ssh_port,
        ssh_identity_file=None if key is None else os.fspath(key),
        output_directory=None if output is None else os.path.abspath(output),
        mpi_args=mpi_words(mpi_args),
    )
