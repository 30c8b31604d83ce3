"""Training with a changing number of ranks, as far as it is the same in every framework."""
