"""A reduction in one call."""

from collectives.kernels.reduction import reduction


def reduce_arrays(out, inputs, dtype, op, prescale=1.0, postscale=1.0):
    """out = postscale * op(prescale * inputs[0], prescale * inputs[1], ...)"""
    reduction(dtype, op, prescale, postscale).combine_silently(out, inputs)
