"""What outlives a process: run folders and checkpoints."""
