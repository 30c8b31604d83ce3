"""The same training for any number of ranks: each step has the same samples, shared by the ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from collectives import InvalidRequestError
from hvd_cluster.core import basics

T = TypeVar("T")


def order(length: int, shuffle: bool, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The indices of a dataset in the order of ``epoch``: int64, of shape (length,).

    NumPy never changes what a RandomState gives, so the versions on the hosts may differ.
    """
    if not shuffle:
        return np.arange(length)
    return np.random.RandomState([seed, epoch]).permutation(length).astype(np.int64)


def share(samples: Sequence[Any], rank: int, size: int) -> Any:
    """The samples of ``rank`` among ``size`` ranks, which differ by one at most; none where there are too few."""
    return samples[rank::size]


def weight(count: int, rank: int, size: int) -> float:
    """What the mean over the share of ``rank`` counts in the mean over ``count`` samples, times ``size``."""
    return len(share(range(count), rank, size)) * size / count


class GlobalBatches:
    """Gives each step the same samples for any number of ranks, as the ``batch_sampler`` of a DataLoader::

        batches = hvd.elastic.GlobalBatches(dataset, global_batch_size=256)
        loader = DataLoader(dataset, batch_sampler=batches)
        state = hvd.elastic.TorchState(model, optimizer, batches=batches)
        ...
        while batches.epoch < 10:
            for images, labels in loader:
                loss = batches.weigh(cross_entropy(model(images), labels))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                batches.advance()
                state.commit()

    The samples of a step follow from ``seed``, epoch and step alone: a step that was cut off is done again with the
    same samples. Each rank gets its share of them. Shares differ by one sample at most, so a rank's mean must not count
    like any other's: :meth:`weigh` scales the loss, a mean over the samples of this rank, so that the average of the
    ranks' gradients is that of the whole batch. A DistributedOptimizer with op=Average, the default, takes that
    average. If a batch has fewer samples than there are ranks, a rank without one gets the first sample of the batch,
    with the weight 0: it takes part, and changes nothing but buffers such as those of a batch norm.

    The last batch of an epoch may be smaller; ``drop_last`` leaves it out. ``shuffle=False`` keeps the order of the
    dataset. Iteration begins at :attr:`step`, and is for the ranks of that moment: begin again when they have changed.
    InvalidRequestError for an empty dataset, or a batch size below 1.

    Attributes: ``epoch``, and ``step``, the number of the next step in it. All ranks have the same.
    """

    def __init__(
        self, dataset: Sized, global_batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self.length = len(dataset)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.step = 0
        self._kept: tuple[int, npt.NDArray[np.int64]] | None = None
        self._check()

    def _check(self) -> None:
        size, seed = self.global_batch_size, self.seed
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidRequestError(f"global_batch_size={size!r} must be an integer of at least 1")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
            raise InvalidRequestError(f"seed={seed!r} must be an integer from 0 to {(1 << 32) - 1}")
        if self.steps_per_epoch == 0:
            raise InvalidRequestError(
                f"an epoch has no step: the dataset has {self.length} samples, and a batch {size}"
                f"{', of which drop_last leaves nothing' * (self.length > 0)}; give more samples or a smaller batch"
            )

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        size = self.global_batch_size
        return self.length // size if self.drop_last else -(-self.length // size)

    def samples(self, step: int) -> npt.NDArray[np.int64]:
        """The indices of all ranks together in ``step`` of the present epoch: int64, of shape (samples,)."""
        if self._kept is None or self._kept[0] != self.epoch:
            self._kept = self.epoch, order(self.length, self.shuffle, self.seed, self.epoch)
        begin = step * self.global_batch_size
        return self._kept[1][begin : begin + self.global_batch_size]

    def __len__(self) -> int:
        """The number of batches that are left in the epoch."""
        return self.steps_per_epoch - self.step

    def __iter__(self) -> Iterator[list[int]]:
        """The samples of this rank for each step that is left in the epoch. A loader may be some steps ahead."""
        rank, size = basics.rank(), basics.size()
        batches = [self.samples(step).tolist() for step in range(self.step, self.steps_per_epoch)]
        return (share(batch, rank, size) or batch[:1] for batch in batches)

    @property
    def weight(self) -> float:
        """The weight of the loss of this rank in the present step: 1 where all ranks have equally many samples."""
        return self.weight_of(self.step)

    def weight_of(self, step: int) -> float:
        """As :attr:`weight`, of another ``step`` of the epoch."""
        count = min(self.global_batch_size, self.length - step * self.global_batch_size)
        return weight(count, basics.rank(), basics.size())

    def weigh(self, loss: T) -> T:
        """``loss``, a mean over the samples of this rank in the present step, scaled as the class says."""
        mean: Any = loss
        scaled: T = mean * self.weight
        return scaled

    def advance(self) -> None:
        """The present step is done; after the last one of an epoch comes the first of the next."""
        self.step += 1
        if self.step == self.steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """How far the training is; the same on all ranks."""
        return {"epoch": self.epoch, "step": self.step, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("length", "global_batch_size", "seed", "shuffle", "drop_last")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, perhaps with another number of ranks.

        InvalidRequestError if those were batches of other samples.
        """
        for name, value in self._identity().items():
            if state_dict[name] != value:
                raise InvalidRequestError(
                    f"the state is of batches with {name}={state_dict[name]!r}, but here {name} is {value!r}; its step "
                    "would have other samples"
                )
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]
