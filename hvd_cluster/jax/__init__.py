"""What Keras needs on its JAX backend: collectives inside of compiled functions.

``frames`` has the structures of XLA's foreign function interface, ``calls`` the one function that XLA calls, ``lists``
JAX's gradients as the optimizer core sees them.
"""
