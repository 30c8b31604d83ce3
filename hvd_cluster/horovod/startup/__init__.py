"""What a Python runs at its start. This folder is put on PYTHONPATH, and not imported from here."""
