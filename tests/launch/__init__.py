"""Tests of convoy.launch."""
