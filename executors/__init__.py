"""Where workers live: placement on hosts, starting, watching and ending them. It knows processes, but no tensors."""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from executors.agents.local.processes import check_command, heeded, passed_on
    from executors.agents.local.supervisor import Ended, Supervisor, Unheard, resolve_grace
    from executors.api import (
        CommandNotFoundError,
        ExecutorError,
        JobSecret,
        PlacementError,
        RemoteError,
        StartTimeoutError,
        WorkerError,
    )
    from executors.dashboard.picture import Address
    from executors.driver.member import PATIENCE_SECONDS, Member, WorkerIdentity
    from executors.failures import FailureKind, brief, kind_of_chain, with_last_lines
    from executors.job import host
    from executors.job.arguments import (
        SECONDS,
        check_integer,
        check_variables,
        interface_names,
        parse_seconds,
        refuse_mpi,
        renamed,
        resolve_seconds,
    )
    from executors.job.call import Call, before_loading, pickle_call
    from executors.job.discovery import (
        DiscoveryError,
        FixedHosts,
        HostDiscovery,
        HostDiscoveryScript,
        parse_host_file,
        parse_host_list,
    )
    from executors.job.elastic_arguments import WRITTEN, ElasticArguments, ResetLimit, resolve_limits
    from executors.job.environment import Course, interface_variables, thread_remark, threads_of
    from executors.job.job import is_job_id
    from executors.job.output import Output, release_consoles, say
    from executors.job.server import STOP_SECONDS, Reception, ServerThread
    from executors.job.worlds import Answer, Published, Report, WorldCall, assign_ranks
    from executors.launchers import bootstrap
    from executors.launchers import table as launcher_table
    from executors.launchers.allocation import allocation_of
    from executors.launchers.bootstrap import Joined
    from executors.launchers.known_ports import own_addresses
    from executors.launchers.lsf import slots_of_hosts
    from executors.launchers.mpirun import place_among
    from executors.launchers.place import Farewell, Place
    from executors.launchers.torch_distributed import StoreRendezvous
    from executors.membership import Limits
else:
    __getattr__ = facade(
        __name__,
        {
            "agents.local.processes": "check_command heeded passed_on",
            "agents.local.supervisor": "Ended Supervisor Unheard resolve_grace",
            "api": "CommandNotFoundError ExecutorError JobSecret PlacementError RemoteError StartTimeoutError "
            "WorkerError",
            "dashboard.picture": "Address",
            "driver.member": "Member PATIENCE_SECONDS WorkerIdentity",
            "failures": "FailureKind brief kind_of_chain with_last_lines",
            "job.arguments": "SECONDS check_integer check_variables interface_names parse_seconds refuse_mpi renamed "
            "resolve_seconds",
            "job.call": "Call before_loading pickle_call",
            "job.discovery": "DiscoveryError FixedHosts HostDiscovery HostDiscoveryScript parse_host_file "
            "parse_host_list",
            "job.elastic_arguments": "ElasticArguments ResetLimit WRITTEN resolve_limits",
            "job.environment": "Course interface_variables thread_remark threads_of",
            "job.job": "is_job_id",
            "job.output": "Output release_consoles say",
            "job.server": "Reception STOP_SECONDS ServerThread",
            "job.worlds": "Answer Published Report WorldCall assign_ranks",
            "launchers.allocation": "allocation_of",
            "launchers.bootstrap": "Joined",
            "launchers.known_ports": "own_addresses",
            "launchers.lsf": "slots_of_hosts",
            "launchers.mpirun": "place_among",
            "launchers.place": "Farewell Place",
            "launchers.torch_distributed": "StoreRendezvous",
            "membership": "Limits",
        },
        {
            "bootstrap": "launchers.bootstrap",
            "host": "job.host",
            "launcher_table": "launchers.table",
        },
    )
