"""What Horovod's bindings share: ``exceptions``, ``process_sets`` and ``util`` are here."""
