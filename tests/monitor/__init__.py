"""Tests of convoy.monitor."""
