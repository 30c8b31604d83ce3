"""The training of a campaign, done again by one process from the samples of each step."""

from hashlib import blake2b
from types import SimpleNamespace

import numpy as np

from tests.faults.jobs.models import Regression
from tests.faults.jobs.training import Batches


class Replay(Regression):
    """A regression that no rank disturbs."""

    def alone(self):
        """The state before the first step."""
        return SimpleNamespace(values=np.zeros_like(self.values))

    def repeat(self, state, samples):
        """Make the step in which rank r had ``samples[r]``; the digest of the parameters after it."""
        count = sum(map(len, samples))
        weights = [len(own) * len(samples) / count for own in samples]
        gradients = [self.gradient(state, list(own)) * weight for own, weight in zip(samples, weights, strict=True)]
        self.descend(state, sum(gradients) / len(gradients))
        return blake2b(state.values.tobytes(), digest_size=8).hexdigest()

    def undisturbed(self, steps):
        """The parameters after ``steps`` steps with the GlobalBatches of the campaign."""
        state, batches = self.alone(), Batches().samples
        for _ in range(steps):
            self.repeat(state, [batches.samples(batches.step)])
            batches.advance()
        return state.values
