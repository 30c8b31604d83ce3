"""Before ranks combine the tensors of a model, or broadcast them, they compare what each of them has.

``models`` is the pure comparison, ``meeting`` the exchange: for one call, or for an optimizer, once in a world. The
names of these exchanges have nothing of the model in them, so ranks whose models differ meet there. ``rosters`` has the
names in flight of lists of gradients, and ``twins`` tells models apart that are alike.
"""
