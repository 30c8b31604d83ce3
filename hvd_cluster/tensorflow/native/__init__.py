"""TensorFlow's C API for ops and kernels, by ctypes: the one place that knows of pointers.

``library`` has the functions, ``status`` their outcome, ``memory`` their tensors, ``construction`` and ``context`` the
two sides of a kernel, ``done`` the end of an asynchronous one, ``shapes`` the shapes of outputs, and ``registration``
makes TensorFlow know an op.
"""
