"""The project's own benchmark suite, which is not installed: `python -m benchmarks` in a checkout.

It is built on `aioenv bench`, which compares vector envs on a user's env.
"""
