"""The wire: frames of raw buffers, sans-IO. Bytes in, frames out; nothing here reads or writes anything."""
