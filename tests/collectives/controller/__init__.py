"""tests.collectives.controller"""
