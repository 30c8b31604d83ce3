"""The parts of training with a changing number of ranks that are the same in every framework."""
