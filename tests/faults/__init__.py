"""Faults that are really injected, and what must survive them."""
