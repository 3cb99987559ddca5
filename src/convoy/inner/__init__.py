"""Inside a node: how one step is computed."""
