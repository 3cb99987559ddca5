"""How submissions change the global weights: one rule per file, pure functions of their inputs."""
