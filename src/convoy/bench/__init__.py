"""Benchmarks: each answers one question, beside its peers, in one run."""
