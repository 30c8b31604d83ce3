"""The options of the commands that serve."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import dataclass

from hvd_cluster.data.compute import ComputeService
from hvd_cluster.tensorflow.data.config import SIDES, TfDataServiceConfig

__all__ = ["Options"]

KEY_BYTES = 32


@dataclass(frozen=True)
class Options:
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
