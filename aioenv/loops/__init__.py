"""Functions around a vector env: `evaluate` and `record`."""
