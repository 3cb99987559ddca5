"""Tests of the memory that vectors lie in."""
