"""How the ranks of a world connect, in steps over the same connections.

First every rank sends rank 0 its hello, and learns from the answer which rank is on which host. Then it offers the
addresses at which its backends, and the relay in its process, can be reached, and learns those of all others. If there
are relays, the ranks of their hosts connect to them, and every rank confirms that. Rank 0 lets no rank start unless all
can, and sends every rank the same reason.

In a large world a rank takes the same steps with the leader of its host in the place of rank 0. The leader passes on
what both say.
"""

from collectives.handshake.connect import HandshakeResult, Offer, connect_channel
from collectives.handshake.hello import Hello

__all__ = ["HandshakeResult", "Hello", "Offer", "connect_channel"]
