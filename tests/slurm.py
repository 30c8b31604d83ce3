"""A SLURM cluster of two nodes, n1 and n2, on this machine, with configuration and state of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress

PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sinfo")
INSTALL = "apt-get install slurmd slurmctld slurm-client"
SECONDS = 60
CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=localhost Port={first} CPUs={cpus}
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname=localhost Port={second} CPUs={cpus}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=5 State=UP
"""


def missing():
    """What is not installed, as the reason to skip; empty: nothing."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        return f"there is no {' and no '.join(absent)}: {INSTALL}"
    return "" if os.geteuid() == 0 else "the daemons of SLURM need root"


@contextmanager
def cluster(folder, cpus=2):
    """Gives the environment in which srun finds the cluster; its nodes claim to have ``cpus``."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        ports = dict(zip(("controller", "first", "second"), _free_ports(3), strict=True))
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, cpus=cpus, **ports))
        for name in ("state", "spool.n1", "spool.n2"):
            (folder / name).mkdir()
        stack.enter_context(_daemon([_find("slurmctld"), "-D"], environment, folder / "controller.log"))
        for node in ("n1", "n2"):
            stack.enter_context(_daemon([_find("slurmd"), "-D", "-N", node], environment, folder / f"{node}.log"))
        _await(lambda: _idle(environment) == 2, "two idle nodes", folder)
        yield environment


@contextmanager
def _daemon(command, environment, log):
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)


def _idle(environment):
    answer = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle"],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS,
    )
    return len(answer.stdout.splitlines())


def _await(condition, what, folder):
    deadline = time.monotonic() + SECONDS
    while not condition():
        logs = "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in folder.glob("*.log"))
        assert time.monotonic() < deadline, f"no {what} within {SECONDS} s\n{logs}"
        time.sleep(0.1)


def _find(program):
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")


def _free_ports(count):
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
