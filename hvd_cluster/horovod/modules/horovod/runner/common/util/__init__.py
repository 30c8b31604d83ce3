"""Hosts, secrets and timeouts of launchers."""
