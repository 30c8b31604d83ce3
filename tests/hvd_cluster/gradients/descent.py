"""A distributed optimizer of NumPy arrays."""

import weakref

from collectives.api import ReduceOp
from hvd_cluster.gradients.combiner import GradientCombiner
from hvd_cluster.gradients.compression import NoneCompressor
from hvd_cluster.gradients.options import Options
from tests.hvd_cluster.gradients.arrays import ArrayBinding, Rows


class Optimizer:
    """Plain gradient descent with a rate of 1."""

    def __init__(self, parameters, rank, passes=1, **options):
        self.parameters = parameters
        reference = weakref.ref(self)
        defaults = {
            "compression": NoneCompressor,
            "op": ReduceOp.SUM,
            "gradient_predivide_factor": 1.0,
            "groups": None,
            "sparse_as_dense": False,
        }
        self.combiner = GradientCombiner(
            self,
            ArrayBinding(self.on_gradient),
            lambda: [reference().parameters],
            {},
            passes,
            Options(**(defaults | options), process_set=rank.process_set),
        )

    def on_gradient(self, parameter):
        self.combiner.on_gradient(parameter)

    def step(self):
        self.combiner.combine()
        for parameter in self.parameters:
            gradient = parameter.gradient
            parameter.data -= gradient.dense() if isinstance(gradient, Rows) else gradient
            parameter.gradient = None
