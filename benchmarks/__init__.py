"""Side-by-side measurements: ours and what a user would pick instead, interleaved in one run."""
