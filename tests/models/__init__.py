"""Tests of convoy.models."""
