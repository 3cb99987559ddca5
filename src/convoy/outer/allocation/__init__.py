"""Who gets how much of a batch: pure functions of measured speeds."""
