"""Pipelined back-propagation: a network cut into stages that work on different batches at once."""
