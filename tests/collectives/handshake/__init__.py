"""tests.collectives.handshake"""
