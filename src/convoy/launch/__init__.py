"""On one machine: start the nodes, and make it behave like several unequal ones."""
