"""The commands of remote shells, and the scripts that they read."""

import subprocess

import pytest

from executors.hosts.exported import exported
from executors.hosts.shell import NO_INPUT, WITH_KUBECTL, RemoteShell, script


@pytest.mark.parametrize(
    ("template", "command"),
    [
        ("ssh", ["ssh", "b", "sh"]),
        ("ssh -p 22 {host}", ["ssh", "-p", "22", "b", "sh"]),
        ("kubectl exec -i {host} --", ["kubectl", "exec", "-i", "b", "--", "sh"]),
        ("ssh 'user@{host}.example'", ["ssh", "user@b.example", "sh"]),
    ],
)
def test_commands(template, command):
    assert RemoteShell(template).command("b") == command


def test_nothing_is_quoted_twice(tmp_path):
    folder = tmp_path / "a 'folder'"
    folder.mkdir()
    text = script(str(folder), {"VARIABLE": "$HOME `id` 'x'"}, ["sh", "-c", 'echo "$VARIABLE"; pwd'])
    done = subprocess.run(["sh"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["$HOME `id` 'x'", str(folder)]


def test_a_folder_that_is_missing():
    done = subprocess.run(["sh"], input=script("/no/folder", {}, ["true"]), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/no/folder" in done.stderr


def test_variables_of_this_host_stay_here():
    environment = {"PATH": "/bin", "HOME": "/root", "SSH_AUTH_SOCK": "x", "NCCL_DEBUG": "INFO", "BASH_FUNC_f%%": "y"}
    environment |= {"CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": "all", "ROCR_VISIBLE_DEVICES": "0"}
    assert exported(environment) == {"PATH": "/bin", "NCCL_DEBUG": "INFO"}


KUBEXEC = {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}
HAND = "run 'ssh b true' by hand to see why"


@pytest.mark.parametrize(
    ("template", "environment", "code", "advice"),
    [
        ("ssh {host}", {}, 255, HAND),
        ("ssh {host}", {}, None, HAND),
        ("ssh {host}", {"OMPI_MCA_plm_rsh_agent": "ssh"}, 255, HAND),
        ("/etc/mpi/kubexec.sh", KUBEXEC, 0, WITH_KUBECTL),
        ("ssh {host}", KUBEXEC, 255, WITH_KUBECTL),
        ("kubectl exec {host} --", KUBEXEC, 0, NO_INPUT),
        ("kubectl exec -i {host} --", KUBEXEC, 1, "run 'kubectl exec -i b -- true' by hand to see why"),
    ],
)
def test_the_advice_if_no_agent_comes(template, environment, code, advice):
    assert RemoteShell(template).advice("b", environment, code) == advice
