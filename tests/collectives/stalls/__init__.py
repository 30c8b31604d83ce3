"""tests.collectives.stalls"""
