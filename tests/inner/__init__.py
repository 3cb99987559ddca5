"""Tests of convoy.inner."""
