"""Collectives in stages: inside each host with one backend, between the hosts with another."""
