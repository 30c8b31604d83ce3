"""What scripts ask Horovod's module of this name."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["extension_available"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a binding for the framework ``ext_base_name``, such as "torch", and the framework itself."""
    return all(find_spec(name) is not None for name in (f"hvd_cluster.{ext_base_name}", ext_base_name))
