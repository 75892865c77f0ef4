"""Models on a GPU that go on by themselves (`backends.base.Rolling`): what is drawn from their rows they are fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from outrider.backends.base import Chains, Rolled, Spans
from outrider.backends.cuda.layout import GRAPH_ROWS
from outrider.backends.cuda.passes import Passes, whole
from outrider.backends.torch_common import on, sent
from outrider.sampling.ops import Drawing, remember
from outrider.types import Slot


class RollingPasses(Passes):
    """Passes one after another, of which the host is told at the end."""

    def roll(self, spans: Spans, steps: int, drawing: Drawing) -> bool:
        ends = [start + fed for start, fed in zip(spans.starts, spans.counts, strict=True)]
        if not self._can_roll(spans.slots, [end + steps - 1 for end in ends]):
            return False
        tokens = drawing.step(self.score(spans).logits[:, : self.info.vocab_size])
        self._forget()
        if steps > 1:
            self._roll(spans.slots, ends, tokens, None, 0, steps, drawing)
        for slot, end in zip(spans.slots, ends, strict=True):
            self._advance(slot, end + steps - 1)
        return True

    def roll_on(self, chains: Chains, steps: int, drawing: Drawing) -> Rolled | None:
        """Each chain is fed its last two tokens, of which the first may be known: all verdicts look alike, then."""
        count, most = len(chains.slots), max(chains.counts)
        ends = [length + most + steps for length in chains.lengths]  # if all drafts stay
        if not self._can_roll(chains.slots, ends) or 2 * count > GRAPH_ROWS[-1]:
            return None
        with torch.inference_mode(), on(self.device):
            lasts = sent(chains.lasts, np.int32, self.device)
            tokens = torch.cat([lasts, torch.as_tensor(chains.drafted).int()])
            ends_at = remember(self._indices, ("ends", *chains.counts), lambda: self._ends(chains.counts))
            before = tokens[torch.where(chains.accepted > 0, ends_at + chains.accepted, self._numbers[:count])]
            fed = torch.stack([before, chains.following.int()], dim=1).flatten().clamp(min=0)
            pairs = [2] * count
            starts = [length - 1 for length in chains.lengths]
            spans = Spans(chains.slots, starts, pairs, pairs, fed)
            program = self._stage(spans, whole(pairs), (), ahead=most).program
            self._forget()
            program.run(fed, by=chains.accepted)
            self._record(program)
            tokens = drawing.step(program.logits[1 : 2 * count : 2, : self.info.vocab_size])
            if steps > 1:
                after = [length + 1 for length in chains.lengths]
                self._roll(chains.slots, after, tokens, chains.accepted, most, steps, drawing)
        leases = [self.pages.leases[slot] for slot in chains.slots]
        for lease, end in zip(leases, ends, strict=True):
            lease.written = end
        return Rolled(chains.slots, steps, [list(lease.pages) for lease in leases])

    def _ends(self, counts: Sequence[int]) -> torch.Tensor:
        """Where each chain's last token before its drafts would be, in a row of all last tokens and then all drafts."""
        ends = np.cumsum(counts) - counts + len(counts) - 1
        return sent(ends, np.int64, self.device)

    def arrive(self, rolled: Rolled, lengths: Mapping[Slot, int]) -> bool:
        self.drop(rolled)
        held = dict(zip(rolled.slots, rolled.pages, strict=True))
        for slot, length in lengths.items():
            end = length + rolled.steps - 1
            used = -(-end // self.pages.page_size)
            if not self.pages.make_room(slot, end) or self.pages.leases[slot].pages[:used] != held.get(slot, [])[:used]:
                return False
        for slot, length in lengths.items():
            self._advance(slot, length + rolled.steps - 1)
        return True

    def drop(self, rolled: Rolled) -> None:
        for slot in rolled.slots:
            if slot in self.pages.leases:
                self.pages.leases[slot].written = 0

    def _can_roll(self, slots: Sequence[Slot], ends: Sequence[int]) -> bool:
        if self.strict or len(slots) > GRAPH_ROWS[-1] or max(ends) > self.info.context:
            return False
        return all(self.pages.make_room(slot, end) for slot, end in zip(slots, ends, strict=True))

    def _roll(
        self,
        slots: list[Slot],
        starts: list[int],
        tokens: Any,
        by: torch.Tensor | None,
        most: int,
        steps: int,
        drawing: Drawing,
    ) -> None:
        """All steps but the first, one token of each slot at a time. by: how far behind `starts` they are."""
        count, size = len(slots), self.info.vocab_size
        once = [1] * count
        with torch.inference_mode(), on(self.device):
            spans = Spans(slots, starts, once, once, tokens)
            program = self._stage(spans, whole(once), (), ahead=most + steps - 2).program
            self._forget()
            program.run(tokens, by=by)
            self._record(program)
            for _ in range(steps - 2):
                program.run_on(drawing.step(program.logits[:count, :size]), self._ones[:count])
            drawing.step(program.logits[:count, :size])
