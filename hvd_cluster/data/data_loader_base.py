"""The base of a data loader, and a mixin that lets it work ahead of the training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from collectives import InvalidRequestError
from hvd_cluster.data.prefetch import Prefetch

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

logger = logging.getLogger(__name__)


class BaseDataLoader:
    """Iterates over batches: a subclass gives :meth:`_iterate`, and ``__len__`` where it knows their number."""

    def _iterate(self) -> Iterable[Any]:
        """The batches of one pass."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """The batch for the caller; subclasses may override this to change it, in the thread of the caller."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin(BaseDataLoader):
    """Makes the batches in a thread of its own; name it before a loader that makes batches on demand::

        class AsyncLoader(AsyncDataLoaderMixin, Loader): ...

        for batch in AsyncLoader(async_loader_queue_size=8, path="..."): ...

    Up to ``async_loader_queue_size`` batches are kept; with 0 there is no thread. ``debug_data_loader`` logs the end of
    each pass. Other arguments are the loader's. An exception of ``_iterate`` is raised in the consumer's loop, after
    the batches that were made before it. Each pass has a thread, which ends with it, also when the loop over the
    batches is left early.
    InvalidRequestError for a size that is no integer of at least 0.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(async_loader_queue_size, int) or async_loader_queue_size < 0:
            raise InvalidRequestError(
                f"async_loader_queue_size={async_loader_queue_size!r} must be an integer of at least 0"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._passes: set[Prefetch] = set()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End all passes; their loops end, too."""
        for each in list(self._passes):
            each.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            return super().__iter__()
        return self._work_ahead()

    def _work_ahead(self) -> Iterator[Any]:
        prefetch = Prefetch(self._iterate, self.async_loader_queue_size)
        self._passes.add(prefetch)
        taken = 0
        try:
            for batch in prefetch:
                taken += 1
                yield self._process_batch(batch)
        finally:
            prefetch.close()
            self._passes.discard(prefetch)
            level = logging.INFO if self.debug_data_loader else logging.DEBUG
            logger.log(level, "%s: %d batches were taken", type(self).__name__, taken)
