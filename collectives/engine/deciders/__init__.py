"""Ways for the ranks to decide which tensors run next."""
