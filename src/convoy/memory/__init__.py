"""Vectors in memory that is used again, and that processes of one machine share."""
