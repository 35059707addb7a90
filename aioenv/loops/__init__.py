"""What people write around a vector env: loops."""
