"""tests.collectives.kernels"""
