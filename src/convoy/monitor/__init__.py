"""What is seen of a run: events, the journal, the terminal."""
