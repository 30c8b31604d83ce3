"""The timeline of a job: the events of its engines as a trace for Chrome's viewer and Perfetto."""
