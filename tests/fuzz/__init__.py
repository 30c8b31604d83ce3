"""Bad inputs: mutated values for each parser, and mutated sessions for each port of a job that trains."""
