"""One round: how wide, what is fed, what it says."""
