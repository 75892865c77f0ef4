"""Measurements people can repeat: commands, never timed tests."""
