"""What an env and its wrappers remember: read out, and written into another."""
