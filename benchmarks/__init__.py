"""Side-by-side measurements: ours and the usual alternative, interleaved in one run."""
