"""Tests of convoy.collectives."""
