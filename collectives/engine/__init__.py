"""The way of a tensor: submitted, decided, run, completed; and the start and the end of all that."""
