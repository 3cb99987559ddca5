"""Images: where they come from, how they become batches."""
