"""The processes of this host: workers under guards, their output and their messages."""
