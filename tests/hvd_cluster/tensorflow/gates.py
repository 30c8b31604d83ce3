"""Operations of a graph that begin late on one rank."""

import threading

import tensorflow as tf

from collectives.events import Submitted
from hvd_cluster.core import basics

SECONDS = 20
MOST = 64


class Gate:
    """Lets the tensors of one place wait until so many operations are submitted on this rank.

    A queue lets them wait without a thread of TensorFlow, which other nodes may need. With a ``session``, it is one of
    the present graph.
    """

    def __init__(self, count=1, session=None):
        self._remaining = count
        self._open = threading.Event()
        self._queue = tf.queue.FIFOQueue(MOST, tf.float32, shapes=[()])
        self._fill = lambda: self._queue.enqueue_many(tf.zeros([MOST]))
        if session is not None:
            fill = self._fill()
            self._fill = lambda: session.run(fill)
        self._thread = threading.Thread(target=self._let_pass)
        self._was_opened = True
        self._end = basics.engine().events.subscribe(self._count)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._open.set()
        self._thread.join()
        self._end()
        assert self._was_opened

    def _count(self, event):
        if type(event) is Submitted:
            self._remaining -= 1
            if self._remaining <= 0:
                self._open.set()

    def _let_pass(self):
        self._was_opened = self._open.wait(SECONDS)
        self._fill()

    def late(self, tensor, is_late=True):
        """``tensor``, which comes late where ``is_late``."""
        token = tf.cond(tf.convert_to_tensor(is_late), self._queue.dequeue, lambda: tf.constant(0.0))
        return tensor + tf.cast(token, tensor.dtype)
