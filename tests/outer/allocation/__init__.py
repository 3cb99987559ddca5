"""Tests of the allocation of shares."""
