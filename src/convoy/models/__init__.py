"""The papers' networks, and the door for any other."""
