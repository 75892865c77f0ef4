"""The engine: one loop, and the ways people call it."""
