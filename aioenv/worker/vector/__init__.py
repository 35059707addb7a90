"""One `gymnasium.vector.VectorEnv` of many slots, in a worker or in the parent."""
