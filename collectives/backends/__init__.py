"""What moves and combines data: one module a backend."""
