"""The kinds of places that images come from."""
