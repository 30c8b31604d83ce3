"""How control messages travel between the ranks."""
