"""Between nodes: who trains which samples, and how results become one model."""

import os

# torchft's Rust side tells every request; it reads this once, when it is first imported.
os.environ.setdefault("RUST_LOG", "error")
