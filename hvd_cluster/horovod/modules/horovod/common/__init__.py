"""Modules that Horovod's bindings share."""
