"""What trying things out may cost: an account of the seconds that drafting gained against plain decoding."""

from __future__ import annotations

ALLOWED_LOSS = 0.02  # of the time: what trying things out may cost
MOST_ROUNDS = 4.0  # plain rounds that the account may come to: gains of long ago do not pay for losses


class Account:
    """Every round adds what its drafts gained or lost, and a share of its time. Below 0 it is in debt."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @property
    def debt(self) -> float:
        return max(0.0, -self.seconds)

    def add(self, round_s: float, gained_s: float, plain_s: float) -> None:
        """A round took so long, and its drafts gained so much. plain_s: what a plain round of the batch takes."""
        self.seconds = min(self.seconds + ALLOWED_LOSS * round_s + gained_s, MOST_ROUNDS * plain_s)

    def covers(self, loss_s: float, left_s: float) -> bool:
        """Whether so much may be lost. left_s: seconds that the present answers go on for; their share counts too."""
        return self.seconds + ALLOWED_LOSS * left_s >= loss_s

    def pay(self, loss_s: float) -> bool:
        """Take a known loss out of what is there; False where that is too little."""
        if self.seconds < loss_s:
            return False
        self.seconds -= loss_s
        return True
