"""Collectives over TCP with pygloo, a second binding of Gloo: for ranks without torch, on Python 3.10.

pygloo never releases the GIL: a rank that waits inside it would send no heartbeat and could not be aborted. So a helper
process owns the context of Gloo. It shares memory with its rank, runs one command at a time, and can be killed.

This file imports nothing, because the helper process imports it, too.
"""
