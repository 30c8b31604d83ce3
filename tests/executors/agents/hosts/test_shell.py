"""The commands of remote shells, and the scripts that they read."""

import os
import random
import shutil
import subprocess
import sys

import pytest

from executors.agents.hosts.shell import NO_INPUT, WITH_KUBECTL, RemoteShell, script
from executors.job.environment import PIECE, exported, packed, shared, startup, unpack


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


SHELLS = [shell for shell in ("dash", "bash", "ksh", "mksh", "yash", "zsh", "busybox") if shutil.which(shell)]
SPECIAL = (
    *("UID", "EUID", "PPID", "GROUPS", "BASHPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO", "BASH_ARGC"),
    *("DIRSTACK", "FUNCNAME", "PIPESTATUS", "HISTCMD", "LINENO", "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS"),
    *("OPTIND", "OPTARG", "IFS", "PS1", "PS4", "ENV", "BASH_ENV", "CDPATH", "TMOUT", "POSIXLY_CORRECT", "LC_ALL"),
    *("LANG", "LINES", "status", "path", "argv", "0", "?", "a.b", "a-b", "a b", "ProgramFiles(x86)"),
    *("BASH_FUNC_x%%", "BASH_FUNC_y()"),
)
VALUES = ["", "1000", "two\nlines\n", 'it\'s "$HOME" `id` \\n \\', "() { echo it; }", "\udcff\udcfe", "ä=b"]
LARGE = random.Random(0).randbytes(PIECE // 2).hex()  # three of these need several pieces
SHOW = """
import os, sys
from executors.job.environment import unpack
unpack(os.environ)
sys.stdout.buffer.write(b"\\0".join(name + b"=" + value for name, value in sorted(os.environb.items())))
"""


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: ascii(value[:20]))
def test_variables_reach_the_agent_as_they_are_whatever_they_mean_to_the_shell(shell, value):
    given = {**dict.fromkeys(SPECIAL, value), "LARGE": LARGE, "LARGER": LARGE[::-1], "LARGEST": LARGE[1:]}
    variables = startup({**os.environ, "PYTHONPATH": os.getcwd()}) | packed(given)
    command = [shutil.which(shell), *(["sh"] if shell == "busybox" else [])]
    text = os.fsencode(script(os.getcwd(), variables, [sys.executable, "-c", SHOW]))
    done = subprocess.run(command, input=text, capture_output=True, env={"PATH": os.environ["PATH"]}, check=True)
    assert done.stderr == b""
    found = dict(entry.split(b"=", 1) for entry in done.stdout.split(b"\0"))
    assert {name: os.fsdecode(found[os.fsencode(name)]) for name in given} == given
    assert not [name for name in found if name.startswith(b"_HOROVOD")]


def test_only_what_python_needs_is_set_by_the_shell():
    given = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/py", "UID": "0", "PYTHON x": "y", "HOME": "/"}
    assert startup(given) == {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONHOME": "/py"}
    assert shared(given) == {name: value for name, value in given.items() if name != "HOME"}


def test_nothing_packed_is_nothing():
    environment = {"A": "b"}
    unpack(environment)
    assert environment == {"A": "b"}
    unpack(environment | packed({}))


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
