"""A real sshd inside a network namespace, and the ssh that reaches it, with keys of their own."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from tests.namespaces import HOSTS

PORT = 2222
SSHD = "/usr/sbin/sshd"
INSTALL = "apt-get install openssh-server"
SECONDS = 30
CONFIG = """
ListenAddress {address}
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
# So that no key of a test gets into the home of its user.
SSH = '#!/bin/sh\nexec {ssh} -F none -o UserKnownHostsFile={folder}/known "$@"\n'


def missing():
    """What is not installed, as the reason to skip; empty: nothing."""
    programs = {SSHD: Path(SSHD).exists(), "ssh": shutil.which("ssh"), "ssh-keygen": shutil.which("ssh-keygen")}
    absent = [name for name, there in programs.items() if not there]
    return f"there is no {' and no '.join(absent)}: {INSTALL}" if absent else ""


@contextmanager
def sshd_on(network, folder):
    """An sshd on the second host of ``network``; gives its address."""
    address = network.address.rpartition(".")[0] + ".2"
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd").write_text(CONFIG.format(address=address, port=PORT, folder=folder))
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(SSH.format(ssh=shutil.which("ssh"), folder=folder))
    (folder / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd wants it
    log = folder / "sshd.log"
    with network.inside(HOSTS[1]), log.open("wb") as file:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd"], stdin=subprocess.DEVNULL, stderr=file)
    try:
        deadline = time.monotonic() + SECONDS
        while "Server listening" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield address
    finally:
        process.terminate()
        process.wait(SECONDS)


def trust(folder, address):
    """Make the key of the host known, as mpirun expects it."""
    options = ["-o", "StrictHostKeyChecking=no", "-p", str(PORT), "-i", folder / "user"]
    subprocess.run(["ssh", *options, address, "true"], env=environment(folder), check=True, timeout=SECONDS)


def environment(folder):
    """The environment in which ``ssh`` is that of :func:`sshd_on`."""
    return {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
