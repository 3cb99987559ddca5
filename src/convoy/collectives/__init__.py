"""Sums over ranks: who sends what when, and what carries it."""
