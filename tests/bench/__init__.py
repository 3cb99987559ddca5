"""Tests of convoy.bench."""
