"""Plain gradient descent with a rate of 1, distributed over ranks that are threads."""

import torch

import hvd_cluster.torch as hvd


def leaf(*shape, dtype=torch.float64):
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


def backward(parameter, gradient):
    """As the backward pass of a loss with that ``gradient``, a tensor or the value of all elements."""
    whole = gradient if isinstance(gradient, torch.Tensor) else torch.full_like(parameter.detach(), gradient)
    torch.autograd.backward(parameter, whole)


def rows(index, size=(5, 2)):
    """A sparse gradient of ones in one row."""
    values = torch.ones(1, *size[1:], dtype=torch.float64)
    return torch.sparse_coo_tensor([[index]], values, size, check_invariants=True)


def values(parameters):
    """The set of the elements of each."""
    return [set(each.detach().reshape(-1).tolist()) for each in parameters]


class Descent:
    """A DistributedOptimizer; a step leaves no gradients."""

    def __init__(self, parameters, rank, op=hvd.Sum, **options):
        self.parameters = parameters
        inner = torch.optim.SGD(parameters, lr=1.0)
        self.optimizer = hvd.DistributedOptimizer(inner, op=op, process_set=rank.process_set, **options)
        self.combiner = getattr(self.optimizer, "_combiner", None)

    def backward(self, gradient=1.0):
        """Of a loss that all parameters have."""
        for each in reversed(self.parameters):
            backward(each, gradient)

    def step(self):
        self.optimizer.step()
        for each in self.parameters:
            each.grad = None
