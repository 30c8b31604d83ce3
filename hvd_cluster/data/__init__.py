"""Data loaders that work ahead, for any framework."""

from hvd_cluster.data.loaders import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
