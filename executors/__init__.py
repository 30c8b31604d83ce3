"""Where workers live: placement on hosts, starting, watching and ending them. Knows processes, never tensors."""
