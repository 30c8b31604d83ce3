"""tests.collectives.engine"""
