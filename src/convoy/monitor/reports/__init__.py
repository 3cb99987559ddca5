"""A run on paper: one HTML file, runs beside each other, pictures."""
