"""The parent's side of a worker process: how it starts, how frames reach it, how it lives and ends."""
