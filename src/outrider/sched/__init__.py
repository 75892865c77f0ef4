"""Which jobs share the next pass. Plans integers, never touches an array."""
