"""tests.collectives.net"""
