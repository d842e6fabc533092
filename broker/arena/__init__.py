"""Memory that the broker owns: segments, and where in them what lies."""
