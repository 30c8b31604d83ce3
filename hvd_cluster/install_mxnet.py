"""``python -m hvd_cluster.install_mxnet``: MXNet beside NumPy 2, into the environment of this Python.

MXNet 1.9.1 says that it needs NumPy 1, so pip installs it in no other way than without its requirements. It works with
NumPy 2 all the same, see ``numpy_for_mxnet``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

MXNET = "mxnet==1.9.1"
REQUIREMENTS = ["requests", "graphviz"]
LIBRARIES = {"libgomp.so.1": "libgomp1", "libquadmath.so.0": "libquadmath0"}
"""Shared libraries that MXNet takes from the system, and Debian's packages that have them."""
CHECK = "import hvd_cluster.mxnet, mxnet; print(mxnet.__version__, float(mxnet.nd.ones(2).sum().asscalar()))"


def commands(python: str, version_info: Sequence[Any], has_pip: bool) -> list[list[str]]:
    """The commands that install MXNet: by pip, or by uv, whose environments have no pip."""
    install = [python, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", python]
    # Two modules of MXNet import distutils, which setuptools has since Python has not.
    others = [*REQUIREMENTS, *(["setuptools"] if tuple(version_info[:2]) >= (3, 12) else [])]
    return [[*install, "--no-deps", MXNET], [*install, *others]]


def advice(error: str) -> str:
    """The remedy for the ``error`` of an import."""
    packages = [package for library, package in LIBRARIES.items() if library in error]
    if packages:
        return f"a library of the system is missing: apt-get install {' '.join(LIBRARIES.values())}, or the like"
    return "see docs/mxnet.md for what it needs: Linux on x86_64 or aarch64, Python 3.10 to 3.13"


def _is_installed() -> bool:
    try:
        return version("mxnet") == MXNET.partition("==")[2]
    except PackageNotFoundError:
        return False


def _install() -> None:
    sys.stdout.write(
        "pip may report a conflict, as MXNet says that it needs NumPy 1; it works with NumPy 2 all the same\n"
    )
    for command in commands(sys.executable, sys.version_info, find_spec("pip") is not None):
        sys.stdout.write(f"$ {' '.join(command)}\n")
        sys.stdout.flush()
        try:
            status = subprocess.call(command)
        except FileNotFoundError:
            sys.exit("there is neither pip nor uv here: python -m ensurepip, and then this command again")
        if status:
            sys.exit(f"MXNet is not installed: {' '.join(command)} ended with status {status}, for the reason above")


def main() -> None:
    """Install what is missing, and check it. Raises SystemExit where that fails."""
    if not _is_installed() or any(find_spec(name) is None for name in REQUIREMENTS):
        _install()
    check = subprocess.run([sys.executable, "-W", "ignore", "-c", CHECK], check=False, capture_output=True, text=True)
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or [f"status {check.returncode}"])[-1]
        sys.exit(f"MXNet is installed, but cannot be imported: {reason}\n{advice(check.stderr)}")
    sys.stdout.write(f"MXNet {check.stdout.split()[0]} works: import hvd_cluster.mxnet as hvd\n")


if __name__ == "__main__":
    main()
