"""Batching: pure numpy. Spaces to flat buffers and back, info dicts to columns and back, autoreset."""
