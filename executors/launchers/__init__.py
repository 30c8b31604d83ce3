"""The launchers that are not ours: what their variables say about this process, and how its rank finds rank 0."""
