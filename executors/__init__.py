"""Where workers live: placement on hosts, starting, watching and ending them. It knows processes, but no tensors."""
