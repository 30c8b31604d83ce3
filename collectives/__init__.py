"""The collective engine: negotiation, fusion, backends, rendezvous. Knows buffers, imports no framework."""
