"""Tests of convoy.cli."""
