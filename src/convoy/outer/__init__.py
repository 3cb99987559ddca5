"""Between nodes: who trains which samples, and how results become one model."""
