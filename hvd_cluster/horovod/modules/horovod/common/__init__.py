"""Modules that Horovod's bindings share: ``exceptions``, ``process_sets`` and ``util``."""
