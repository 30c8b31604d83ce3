"""Connections between processes: addresses, descriptors, attempts, channels of control messages."""
