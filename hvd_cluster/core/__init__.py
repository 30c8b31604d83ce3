"""The one engine of the process: its worlds, process sets, observers, and the launcher that started it."""
