"""Arithmetic and copies on the memory of one process."""
