"""Tests of convoy.outer."""
