"""Tests of the MXNet binding, in an environment with MXNet: ``make test-mxnet``."""
