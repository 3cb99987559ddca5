"""A training step as a graph of tasks on all cores of a node."""
