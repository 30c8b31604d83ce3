"""The engine as a backend of ``ray.util.collective``: ``import hvd_cluster.ray.torch`` registers "HVD"."""

from hvd_cluster.ray.torch.collective import HvdGroup

__all__ = ["HvdGroup"]
