"""A program that never answers."""

import sys

sys.stdin.read()
