"""The modules that exist under Horovod's names only. They are found by the alias, and not imported from here."""
