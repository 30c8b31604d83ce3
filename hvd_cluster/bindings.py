"""Which frameworks have a binding here, in Horovod's words."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["EXTENSIONS", "check_extension", "extension_available"]

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a binding for the framework ``ext_base_name``, such as "torch", and the framework itself."""
    return all(find_spec(name) is not None for name in (f"hvd_cluster.{ext_base_name}", ext_base_name))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError where there is no binding ``ext_name``, such as "horovod.torch"; the other arguments are not needed.

    They are about how Horovod's extensions are compiled.
    """
    framework = ext_name.removeprefix("horovod.")
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs a binding of hvd-cluster for {framework}, and {framework} itself")
