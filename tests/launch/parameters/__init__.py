"""The parameter service as a process: messages, memory, files."""
