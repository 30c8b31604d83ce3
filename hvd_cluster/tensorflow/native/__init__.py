"""TensorFlow's C API for ops and kernels, by ctypes: the one place that knows of pointers.

``library`` has the functions and their outcome, ``context`` a run of a kernel and its tensors, ``done`` the end of an
asynchronous one, ``shapes`` the shapes of outputs, and ``registration`` makes TensorFlow know an op.
"""
