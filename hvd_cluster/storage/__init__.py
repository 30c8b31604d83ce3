"""Checkpoints in folders, of any framework: a binding turns states into bytes and back.

``folders`` writes files that appear whole, ``series`` decides which checkpoints a folder keeps, ``checkpoints`` has the
ranks agree, and writes in the background.
"""
