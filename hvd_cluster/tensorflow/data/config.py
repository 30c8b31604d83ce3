"""Everything that a process must know to take part in a data service, and the options of the commands that serve."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from executors import StartTimeoutError
from hvd_cluster.data.compute import ComputeClient, ComputeService

SIDES = ("compute", "training")
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The plan of a data service, and how to reach its compute service.

    Attributes:
        dispatchers: number of dispatchers, at least 1. Rank ``r`` reads from dispatcher ``r % dispatchers``.
        workers_per_dispatcher: number of workers of each dispatcher, at least 1.
        dispatcher_side: "compute" if the dispatchers run beside the workers, "training" if in the ranks that train.
        addresses: those of the compute service, by network interface.
        key: the secret of the compute service.
        timeout: seconds to wait for a registration, or for a process that is silent.

    Raises ValueError for a value that is not allowed.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, list[tuple[str, int]]]
    key: bytes = field(repr=False)
    timeout: float = 60

    def __post_init__(self) -> None:
        for name in ("dispatchers", "workers_per_dispatcher"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.dispatcher_side not in SIDES:
            raise ValueError(f"dispatcher_side={self.dispatcher_side!r} must be 'compute' or 'training'")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r} must be a positive number of seconds")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A client of the compute service, whose caller closes it."""
        return ComputeClient(self.addresses, self.key, verbose, timeout=self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """All of it as values that JSON knows; the key as hexadecimal digits."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """The reverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError for other values."""
        addresses = {name: [(host, port) for host, port in pairs] for name, pairs in config["addresses"].items()}
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write the file, which then exists as a whole; only its owner may read it, because the key is in it.

        Raises OSError.
        """
        path = Path(filename)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # with mode 0600
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @staticmethod
    def read(
        filename: str | os.PathLike[str], wait_for_file_creation: bool = False, timeout: float = 600.0
    ) -> TfDataServiceConfig:
        """The configuration in the file.

        Raises FileNotFoundError if there is none; with ``wait_for_file_creation``, StartTimeoutError if there is none
        after ``timeout`` seconds. Raises ValueError for a file that holds something else.
        """
        path, deadline = Path(filename), time.monotonic() + timeout
        while wait_for_file_creation and not path.exists():  # Bound: timeout; abort: an interrupt.
            if time.monotonic() > deadline:
                raise StartTimeoutError(f"{path} was not created within {timeout:g} s; check that the compute job runs")
            time.sleep(POLL_SECONDS)
        try:
            return TfDataServiceConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not the configuration of a data service ({error!r})") from error


KEY_BYTES = 32


@dataclass(frozen=True)
class ServiceOptions:
    """The data service that a command line asks for."""

    configfile: str
    dispatchers: int
    dispatcher_side: str
    timeout: float

    @staticmethod
    def parser(usage: str) -> argparse.ArgumentParser:
        """A parser of these options for the command ``usage``."""
        parser = argparse.ArgumentParser(
            usage=f"{usage} CONFIGFILE [options]", description="Serve data for training with tf.data."
        )
        parser.add_argument("configfile", metavar="CONFIGFILE", help="file to write, which the training job reads")
        parser.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers; 1 by default")
        parser.add_argument(
            "--dispatcher-side",
            choices=SIDES,
            default="compute",
            help="where the dispatchers run: beside the workers (compute, the default), or in the training ranks",
        )
        parser.add_argument(
            "--timeout", type=float, default=60, help="seconds to wait for dispatchers and workers; 60 by default"
        )
        return parser

    def service(self, size: int) -> tuple[ComputeService, TfDataServiceConfig]:
        """A new compute service for ``size`` workers, with a new key, and its configuration, which is written.

        The caller ends the service. Raises ValueError unless the workers can be shared out, OSError for the file.
        """
        if self.dispatchers < 1 or size % self.dispatchers:
            raise ValueError(
                f"{size} workers cannot be shared out among --dispatchers {self.dispatchers}; use a number of workers "
                "that is a multiple"
            )
        each, key = size // self.dispatchers, secrets.token_bytes(KEY_BYTES)
        service = ComputeService(self.dispatchers, each, key)
        try:
            addresses = service.addresses()
            config = TfDataServiceConfig(
                self.dispatchers, each, self.dispatcher_side, addresses, key, timeout=self.timeout
            )
            config.write(self.configfile)
        except BaseException:
            service.shutdown()
            raise
        return service, config
