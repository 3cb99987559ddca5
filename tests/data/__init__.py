"""Tests of convoy.data."""
