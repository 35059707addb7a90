"""The code that runs inside a worker process: a blocking loop around a service. It imports no asyncio (35 ms)."""
