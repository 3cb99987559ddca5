"""Tests of convoy.storage."""
