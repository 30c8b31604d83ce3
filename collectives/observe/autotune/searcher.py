"""The program that searches: Bayesian optimisation, in a process of its own.

The library needs seconds of a core, warns, and holds the interpreter. Here none of that touches training. Each line of
standard input is a request in JSON, each line of standard output the answer to one; it ends with its standard input.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

EXPLORATION = 0.01
"""The margin of expected improvement, as in Horovod."""
SEED = 1


class _Optimizer:
    """Gaussian process with expected improvement over ``knobs`` numbers from 0 to 1; ``noise`` is that of the scores.

    Source: Horovod's defaults, with the package bayesian-optimization.
    """

    def __init__(self, knobs: int, noise: float) -> None:
        from bayes_opt import BayesianOptimization, acquisition

        self._names = [str(number) for number in range(knobs)]
        self._optimizer = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(self._names, (0.0, 1.0)),
            acquisition_function=acquisition.ExpectedImprovement(xi=EXPLORATION),
            random_state=SEED,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimizer.set_gp_params(alpha=max(noise, 1e-6))

    def suggest(self) -> list[float]:
        suggested = self._optimizer.suggest()
        return [float(suggested[name]) for name in self._names]

    def register(self, positions: Sequence[float], score: float) -> None:
        self._optimizer.register(dict(zip(self._names, positions, strict=True)), score)


def _answers(requests: TextIO) -> Iterator[Any]:
    optimizer: _Optimizer | None = None
    for line in requests:
        request = json.loads(line)
        if optimizer is None:
            optimizer = _Optimizer(request["knobs"], request["noise"])
            yield None
        elif "score" in request:
            optimizer.register(request["positions"], request["score"])
            yield None
        else:
            yield optimizer.suggest()


def main() -> None:
    """The command line."""
    warnings.simplefilter("ignore")
    output, sys.stdout = sys.stdout, sys.stderr  # the library prints, too

    def say(answer: Any) -> None:
        output.write(json.dumps(answer) + "\n")
        output.flush()

    try:
        for answer in _answers(sys.stdin):
            say({"answer": answer})
    except Exception as error:  # noqa: BLE001 - the caller reports it
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
