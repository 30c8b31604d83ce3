"""Data loaders that work ahead, for any framework."""

from hvd_cluster.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
