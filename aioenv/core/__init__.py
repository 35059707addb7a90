"""What happens between a call of the vector env and the workers: slots, batches, scheduling, images."""
