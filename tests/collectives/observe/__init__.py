"""tests.collectives.observe"""
