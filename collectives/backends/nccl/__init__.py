"""Collectives between GPUs with NVIDIA's NCCL."""

from collectives.backends.nccl.backend import NcclBackend

__all__ = ["NcclBackend"]
