"""Jobs of Ray Train: its backends, the replacement of lost workers, the last reports."""
