"""What runs inside a worker process: a blocking loop around a service. No asyncio (35 ms a worker)."""
