"""Finds the parameters under which a job is fastest, while it runs."""
