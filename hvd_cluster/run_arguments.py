"""Pure: the arguments of ``run()`` -> their values. Each ValueError says which values are allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from executors.arguments import check_integer, interface_names
from executors.hosts.host_list import parse_host_list
from hvd_cluster.hvdrun.values import words

__all__ = ["check_controller", "hosts", "interfaces", "mpi_words", "port", "script"]

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


def hosts(text: object) -> dict[str, int] | None:
    """The hosts in ``text``, with their slots; None for None."""
    if text is None:
        return None
    try:
        return parse_host_list(text if isinstance(text, str) else "")
    except ValueError as error:
        form = "must be hosts with their slots, such as 'node1:4,node2:4'"
        raise ValueError(f"hosts is {text!r}, but {form}; {error}") from None


def port(given: object) -> int | None:
    """The port of ssh; None for None."""
    if given is None:
        return None
    number = check_integer(given, "ssh_port", 1)
    if number > LARGEST_PORT:
        raise ValueError(f"ssh_port is {number}, but must be at most {LARGEST_PORT}")
    return number


def script(given: object) -> str | None:
    """The program that prints the hosts; None for None."""
    if given is not None and (not isinstance(given, str) or not given.strip()):
        raise ValueError(f"host_discovery_script is {given!r}, but must be a program, or a line for the shell")
    return given


def interfaces(nics: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names of network interfaces, also out of a text with commas; none for None."""
    return interface_names(nics.split(",") if isinstance(nics, str) else nics)
