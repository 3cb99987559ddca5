"""Data parallel convolutions, model parallel fully connected layers."""
