"""Code that a Python process runs at its start. This folder is put on PYTHONPATH; this package is not imported."""
