"""The OpenAI-compatible server: HTTP in, rounds out. Requests go to the engine's thread through `worker.py`."""
