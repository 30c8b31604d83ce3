"""Jobs whose workers are processes of hosts: a command or a function on each of a number of ranks."""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from executors.agents.hosts.arguments import PlaceArguments, Places
    from executors.agents.hosts.job import HOST, HostsOptions, resolve_start_timeout, run_command, run_function
else:
    __getattr__ = facade(
        __name__,
        {
            "arguments": "PlaceArguments Places",
            "job": "HOST HostsOptions resolve_start_timeout run_command run_function",
        },
    )
