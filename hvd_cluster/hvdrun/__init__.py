"""The command ``hvdrun``: its flags, where their values come from, and what they mean for the ranks."""
