"""Pure: the user's request -> placement group bundles."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The number of workers, their placement, and the resources of each.

    Either ``num_workers``, packed on as few hosts as possible, or ``num_hosts`` different hosts with
    ``num_workers_per_host`` workers each. Raises ValueError if the numbers make no sense.
    """

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int | None = 1
    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        _check_count("num_workers", self.num_workers, optional=True)
        _check_count("num_hosts", self.num_hosts, optional=True)
        _check_count("num_workers_per_host", self.num_workers_per_host, optional=True)
        _check_count("cpus_per_worker", self.cpus_per_worker)
        _check_count("gpus_per_worker", self.gpus_per_worker, optional=True)
        self._check_shape()
        self._check_gpus()

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.num_workers or (self.num_hosts or 0) * self._per_bundle

    @property
    def worker(self) -> dict[str, float]:
        """The resources of one worker."""
        gpus = {"GPU": float(self.gpus_per_worker or 1)} if self.use_gpu else {}
        return {"CPU": float(self.cpus_per_worker), **gpus}

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one bundle: of one worker, or of all workers of one host."""
        return {name: amount * self._per_bundle for name, amount in self.worker.items()}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The placement group's bundles."""
        return [self.bundle] * (self.size // self._per_bundle)

    @property
    def total(self) -> dict[str, float]:
        """The resources of all workers."""
        return {name: amount * self.size for name, amount in self.worker.items()}

    @property
    def strategy(self) -> str:
        """Ray's placement strategy."""
        return "PACK" if self.num_hosts is None else "STRICT_SPREAD"

    def bundle_of(self, worker: int) -> int:
        """The index of the bundle that ``worker`` belongs in."""
        return worker // self._per_bundle

    @property
    def _per_bundle(self) -> int:
        return 1 if self.num_hosts is None else self.num_workers_per_host or 1

    def _check_shape(self) -> None:
        if (self.num_workers is None) == (self.num_hosts is None):
            raise ValueError(
                f"num_workers is {self.num_workers} and num_hosts is {self.num_hosts}; give one of them: num_workers "
                "for workers anywhere, num_hosts with num_workers_per_host for the same number on every host"
            )
        if self.num_hosts is not None and self.num_workers_per_host is None:
            raise ValueError("num_workers_per_host is None, but must be a positive integer when num_hosts is given")
        if self.num_workers is not None and self.num_workers_per_host not in (None, 1):
            raise ValueError(
                f"num_workers_per_host is {self.num_workers_per_host}, which has no meaning with num_workers; "
                "give num_hosts instead of num_workers to place the same number on every host"
            )

    def _check_gpus(self) -> None:
        if not isinstance(self.use_gpu, bool):
            raise ValueError(f"use_gpu is {self.use_gpu!r}, but must be True or False")
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ValueError(f"gpus_per_worker is {self.gpus_per_worker}, but use_gpu is False; set use_gpu=True")


def _check_count(name: str, value: object, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        allowed = "a positive integer" + (" or left out" if optional else "")
        raise ValueError(f"{name} is {value!r}, but must be {allowed}")
