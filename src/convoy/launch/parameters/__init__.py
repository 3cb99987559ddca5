"""The parameter service: its shell, its process, what nodes say to it, and what it keeps."""
