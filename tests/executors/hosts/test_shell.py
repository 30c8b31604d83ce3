"""The commands of remote shells, and the scripts that they read."""

import subprocess

import pytest

from executors.hosts.exported import exported
from executors.hosts.shell import RemoteShell, script


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


def test_variables_of_the_session_stay_here():
    environment = {"PATH": "/bin", "HOME": "/root", "SSH_AUTH_SOCK": "x", "NCCL_DEBUG": "INFO", "BASH_FUNC_f%%": "y"}
    assert exported(environment) == {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
