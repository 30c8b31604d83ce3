"""The way of a gradient: the modules of ours between its hook and the engine."""

import sys
from pathlib import Path

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics

ROOT = Path(hvd.__file__).parents[2]
ENGINE = "collectives/engine/"
WAY = {
    "hvd_cluster/core/basics.py",
    "hvd_cluster/ops/submission.py",
    "hvd_cluster/torch/optimizer/gradient_optimizer.py",
    "hvd_cluster/torch/optimizer/hooks.py",
    "hvd_cluster/torch/optimizer/reduction.py",
    "hvd_cluster/torch/optimizer/transfers.py",
    "hvd_cluster/torch/tensors.py",
}


class Tracer:
    """The modules that ran up to the last submission; not those that the engine calls."""

    def __init__(self):
        self.passed, self._reached, self._depth = set(), set(), 0

    def __call__(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(ROOT) or ".venv" in path.parts:
            return
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(ENGINE):
            self._depth += 1 if event == "call" else -1
            if name == f"{ENGINE}engine.py" and frame.f_code.co_name in ("submit", "submit_group"):
                self.passed |= self._reached
        elif event == "call" and not self._depth and name.startswith(("collectives/", "hvd_cluster/")):
            self._reached.add(name)


def traced(patient):
    """A small and a large gradient, in a step after several others."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (5, 40_000, 6)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    tracer, engine = Tracer(), basics.engine()
    before = engine._driver.patient
    for step in range(5):
        engine._driver.patient = patient
        loss = sum(each.sum() for each in parameters)
        if step == 4:
            sys.setprofile(tracer)
        try:
            loss.backward()
            optimizer.step()
        finally:
            sys.setprofile(None)
        optimizer.zero_grad()
    engine._driver.patient = before
    return sorted(tracer.passed)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("patient", [True, False])
def test_a_gradient_passes_seven_modules(ranks, patient):
    """In the step, or during backward."""
    for passed in ranks.run(traced, patient):
        assert set(passed) == WAY
