"""The engine between a call of the vector env and the workers: slots, batches, the request scheduler, images."""
