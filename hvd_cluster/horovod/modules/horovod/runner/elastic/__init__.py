"""How an elastic job finds its hosts."""
