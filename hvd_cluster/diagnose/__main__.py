"""``python -m hvd_cluster.diagnose``: versions, limits and a trial of each backend, as text or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collectives import registry
from hvd_cluster.diagnose.machine import Machine, installed_versions
from hvd_cluster.diagnose.trial import DEFAULT, BackendTrial, Launch, launch, try_row

GIBIBYTE = 1 << 30
LABEL = 14


@dataclass(frozen=True, slots=True)
class DiagnosisReport:
    """Versions, limits and trials. The first of ``trials`` is that of the default."""

    versions: dict[str, str | None]
    machine: Machine
    trials: Sequence[BackendTrial]

    @property
    def status(self) -> int:
        """The exit status: 0 where a job that asks for nothing works, else 1."""
        return 0 if self.trials[0].works else 1

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        trials = [{**asdict(trial), "works": trial.works} for trial in self.trials]
        return {"versions": self.versions, "machine": asdict(self.machine), "backends": trials}

    def as_text(self) -> str:
        """For the terminal. It needs no library, because libraries may be missing."""
        sections = {
            "Versions": [_line(name, version or "-") for name, version in self.versions.items()],
            "Machine": list(_of_machine(self.machine)),
            "An allreduce of 1 MiB on two processes": [_of_trial(trial) for trial in self.trials],
        }
        return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items()) + "\n"


def _line(label: str, text: str) -> str:
    return f"  {label:<{LABEL}} {text}"


def _of_machine(machine: Machine) -> Iterator[str]:
    yield _line("system", f"{machine.system}, {machine.processor}")
    yield _line("cores", f"{machine.cores} of {machine.all_cores}")
    yield _line("memory", f"{machine.memory / GIBIBYTE:.1f} GiB")
    free, total = machine.shared_memory_free / GIBIBYTE, machine.shared_memory / GIBIBYTE
    yield _line("/dev/shm", f"{free:.2f} of {total:.2f} GiB free")
    yield _line("ulimit -n", str(machine.descriptors))
    for name, address in machine.interfaces.items():
        yield _line(f"interface {name}", address or "no address")


def _of_trial(trial: BackendTrial) -> str:
    text = f"no: {trial.reason}" if trial.seconds is None else f"{trial.seconds * 1000:.2f} ms"
    return _line(f"{trial.device}: {trial.name}", text)


ABOUT = (
    "Show versions and limits of this machine, and let two processes do an allreduce by each backend. "
    "The exit status is 0 where a job that asks for nothing works, else 1."
)


def main(argv: Sequence[str] | None = None, launch: Launch = launch) -> int:
    """Write a :class:`DiagnosisReport` to standard output; returns the exit status. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m hvd_cluster.diagnose", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="write JSON")
    options = parser.parse_args(argv)
    trials = [try_row(row, launch) for row in (DEFAULT, *registry.rows())]
    report = DiagnosisReport(installed_versions(), Machine.here(), trials)
    text = json.dumps(report.as_data(), indent=2) + "\n" if options.json else report.as_text()
    sys.stdout.write(text)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
