"""The OpenAI-compatible server: HTTP in, rounds out. The engine runs on a thread of its own (`worker.py`)."""
