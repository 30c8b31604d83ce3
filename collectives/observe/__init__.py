"""The observers of an engine: timeline, metrics, autotuning, and the live page."""
