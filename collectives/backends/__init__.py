"""The backends, which move and combine data: one module for each."""
