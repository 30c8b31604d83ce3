"""How a program of this host becomes a program of another host: a remote shell, such as ssh."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PLACEHOLDER = "{host}"
AGENT, KUBEXEC, KUBECTL = "OMPI_MCA_plm_rsh_agent", "kubexec.sh", "kubectl"
NO_INPUT = "the remote shell must pass its standard input on to sh, as ssh and 'kubectl exec -i' do"
WITH_KUBECTL = (
    "the kubexec.sh of Kubeflow's MPI operator v1 passes no standard input, which has the secret of the job; give "
    "--remote-shell '/opt/kube/kubectl exec -i {host} --', or let mpirun start the ranks (--mpi), or use the operator "
    "v2, which has ssh"
)


@dataclass(frozen=True)
class RemoteShell:
    """The command ``template`` runs ``sh`` on a host, whose name replaces ``{host}`` or else is the last argument.

    ``sh`` reads its script from the standard input, so no secret is on a command line, and nothing is quoted twice.
    Raises ValueError for a template that is empty, or has an open quotation mark.
    """

    template: str

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.template)
        except ValueError as error:
            raise ValueError(f"the remote shell {self.template!r} cannot be read: {error}") from error
        if not words:
            raise ValueError("the remote shell is empty; give a command such as 'ssh {host}'")

    def command(self, host: str) -> list[str]:
        """The command that reads the script for ``host``."""
        words = shlex.split(self.template)
        named = [word.replace(PLACEHOLDER, host) for word in words]
        return [*named, "sh"] if named != words else [*named, host, "sh"]

    def advice(self, host: str, environment: Mapping[str, str], exit_code: int | None = None) -> str:
        """Advice for a shell that started no agent on ``host``; ``environment`` is that of this process."""
        if environment.get(AGENT, "").endswith(KUBEXEC) and KUBECTL not in self.template:
            return WITH_KUBECTL
        if exit_code == 0:
            return NO_INPUT
        command = " ".join([*self.command(host)[:-1], "true"])
        return f"run {command!r} by hand to see why"


def script(folder: str, variables: Mapping[str, str], command: Sequence[str]) -> str:
    """The script of ``sh`` that runs ``command`` with ``variables``, whose names mean nothing to it, in ``folder``."""
    return "\n".join(
        [
            f"cd {shlex.quote(folder)} || exit 1",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"exec {shlex.join(command)}",
            "",
        ]
    )
