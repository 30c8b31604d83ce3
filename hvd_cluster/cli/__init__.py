"""The command ``hvdrun``: its flags, the sources of their values, and their variables in the ranks."""
