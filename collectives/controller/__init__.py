"""Pure: which tensors run, in which batches and in which order. No socket, no clock, no thread."""
