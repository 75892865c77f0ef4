"""Text that was seen: an index of running requests and past ones, by tenant, in memory that is fixed beforehand.

Every place of a text (the token there is what followed) is filed under the hashes of the n-grams before it, for a few n
(2, 4 and 8): a table holds the latest place of each hash, and each place links to the one before it with the same hash.
A search takes the longest of these n-grams that occurred, looks at its latest places and extends each match token by
token. So

- a new token costs a hash and a link per n, and a search a fixed number of looks, whatever is there already;
- a token takes 33 bytes, all in flat arrays; tries and suffix trees have a node or more per token, each an object;
- the latest text comes first, and forgetting a text is giving back its blocks.

The price: counts are of the latest occurrences, not of all, and a longer match is missed when it is older than the
places looked at.

A text lies in blocks, each of which begins with a copy of the last tokens of the one before, so that a match never
needs two blocks:

    block 7   [ . . . . | a b c d e f ]      copy | own tokens      (a text begins with blanks: nothing matches them)
    block 9   [ c d e f | g h _ _ _ _ ]      h is the last token so far

Neither a hash nor a link proves anything: a slot of the table may have two n-grams, and a block that was given back has
other text now. So every place is compared token by token, and its block must belong to the tenant who asks.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary
from zlib import crc32

import numpy as np

from outrider.config import SuffixConfig

BLOCK = 64  # tokens; the shortest text takes a block, so blocks bound the number of texts, too
MOST_SIZE = 8  # of an n-gram that is filed; longer matches are found by extending
DOUBTFUL = 4  # places of one hash that are looked at before it is given up
FAR = 1000  # newer places of the same hash that are gone through to take one back
BLANK = -1  # no token

Place = int  # index into the tokens of all blocks; 0 is none


class Tenant:
    """Whose texts these are."""

    __slots__ = ("__weakref__", "finished", "num_blocks", "salt")

    def __init__(self, name: str) -> None:
        self.salt = crc32(name.encode("utf-8", "surrogatepass"))
        self.num_blocks = 0
        self.finished: OrderedDict[Text, None] = OrderedDict()  # oldest first


class Text:
    """One request's tokens, as far as they were read."""

    __slots__ = ("blocks", "last", "length", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.blocks: list[int] = []
        self.length = 0
        self.last = BLANK


class Match(NamedTuple):
    """The last `length` tokens occurred before, and these are the places after them, latest first."""

    length: int
    places: list[Place]


NO_MATCH = Match(0, [])


class Past:
    """All texts of all tenants."""

    def __init__(self, config: SuffixConfig) -> None:
        self.tenants: WeakValueDictionary[str, Tenant] = WeakValueDictionary()  # gone with the last of its texts
        self._finished: OrderedDict[Text, None] = OrderedDict()
        self._occurrences = config.occurrences
        self._overlap = config.max_match
        self._stride = config.max_match + BLOCK
        self._sizes = _sizes(config.min_match, config.max_match)
        num_blocks = max(1, config.max_tokens // BLOCK) + 1  # block 0 is none
        self._tenant_blocks = max(1, (config.tenant_tokens or config.max_tokens) // BLOCK)
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owners: list[Tenant | None] = [None] * num_blocks
        self._texts: list[Text | None] = [None] * num_blocks
        self._orders = array("I", [0]) * num_blocks  # of a block in its text
        self._tokens = array("i", [BLANK]) * (num_blocks * self._stride)
        # Zeros of numpy take no memory until they are written, and a view of them is as quick as an array.
        self._links = np.zeros(num_blocks * self._stride * len(self._sizes), dtype=np.uint32).data
        num_heads = 1 << max(12, (config.max_tokens - 1).bit_length())
        self._mask = num_heads - 1
        # hash -> the latest place. Written at once: the first touch of a page takes longer than filing ten tokens, and
        # the first prompt would pay for all of them.
        heads = np.full((len(self._sizes), num_heads), 0, dtype=np.uint32)
        self._heads = [table.data for table in heads]

    def open(self, tenant: str) -> Text:
        """An empty text: what is read into it can be found at once."""
        known = self.tenants.get(tenant)
        if known is None:
            known = self.tenants[tenant] = Tenant(tenant)
        return Text(known)

    def read(self, text: Text, tokens: Sequence[int], stop: int) -> None:
        """Take in `tokens` up to `stop`, of which `text` holds the beginning; less where there is no room."""
        while text.length < stop:
            used = text.length % BLOCK
            if used == 0 and not self._take_block(text, tokens):
                return
            start, end = text.length, min(stop, text.length - used + BLOCK)
            place = text.blocks[-1] * self._stride + self._overlap + used
            self._tokens[place : place + end - start] = array("i", tokens[start:end])
            self._file(place, tokens, start, end, text.tenant.salt)
            text.length, text.last = end, tokens[end - 1]

    def _file(self, place: Place, tokens: Sequence[int], start: int, end: int, salt: int) -> None:
        """Put the places of tokens[start:end] under the n-grams before them."""
        links, mask = self._links, self._mask
        tables = list(zip(self._sizes, self._heads, strict=True))
        at = place * len(tables)
        for index in range(start, end):
            for size, heads in tables:
                if size <= index:
                    head = (hash(tuple(tokens[index - size : index])) ^ salt) & mask
                    links[at] = heads[head]
                    heads[head] = place
                at += 1
            place += 1

    def rewind(self, text: Text, tokens: Sequence[int]) -> None:
        """Take back what is not a beginning of `tokens`, as if it had never been read."""
        kept = self._common(text, tokens)
        while text.length > kept:
            text.length -= 1
            place = text.blocks[-1] * self._stride + self._overlap + text.length % BLOCK
            self._unfile(place, text.length, text.tenant.salt)
            self._tokens[place] = BLANK
            if text.length % BLOCK == 0:
                self._give_back(text, [text.blocks.pop()])
        text.last = tokens[kept - 1] if kept else BLANK

    def _common(self, text: Text, tokens: Sequence[int]) -> int:
        """How many tokens of a text are the same as these."""
        for order, block in enumerate(text.blocks):
            start, begin = order * BLOCK, block * self._stride + self._overlap
            count = min(BLOCK, text.length - start)
            held, given = self._tokens[begin : begin + count].tolist(), list(tokens[start : start + count])
            if held != given:
                pairs = zip(held, given, strict=False)
                return start + next((same for same, (a, b) in enumerate(pairs) if a != b), len(given))
        return text.length

    def _unfile(self, place: Place, index: int, salt: int) -> None:
        """Take a place out of its chains: whoever links to it links to what it linked to."""
        links, num_sizes = self._links, len(self._sizes)
        for rank, size in enumerate(self._sizes):
            if size > index:
                break
            head = (hash(tuple(self._tokens[place - size : place])) ^ salt) & self._mask
            newer, steps = self._heads[rank][head], FAR
            if newer == place:
                self._heads[rank][head] = links[place * num_sizes + rank]
                continue
            while newer and steps and links[newer * num_sizes + rank] != place:
                newer, steps = links[newer * num_sizes + rank], steps - 1
            if newer and steps:
                links[newer * num_sizes + rank] = links[place * num_sizes + rank]

    def finish(self, text: Text) -> None:
        """The text grows no more: it is kept until its room is needed."""
        if text.blocks:
            text.tenant.finished[text] = self._finished[text] = None

    def drop(self, text: Text) -> None:
        """Forget a finished text. Links to it stay behind and lead nowhere, or into other text."""
        del text.tenant.finished[text], self._finished[text]
        self._give_back(text, text.blocks)
        text.blocks, text.length = [], 0

    def _give_back(self, text: Text, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._owners[block] = self._texts[block] = None
        self._free += blocks
        text.tenant.num_blocks -= len(blocks)

    def find(self, tenant: Tenant, tokens: Sequence[int]) -> Match:
        """The longest end of `tokens` that this tenant's texts hold, and where."""
        held, links, owners, stride, num_sizes = self._tokens, self._links, self._owners, self._stride, len(self._sizes)
        length, most = len(tokens), self._overlap if self._overlap < len(tokens) else len(tokens)
        for rank in range(num_sizes - 1, -1, -1):
            matched = self._sizes[rank]
            if matched > length:
                continue
            gram = tokens[length - matched :]
            place = self._heads[rank][(hash(tuple(gram)) ^ tenant.salt) & self._mask]
            if place == 0:
                continue
            wanted = array("i", gram)
            places: list[Place] = []
            seen: list[Place] = []  # a link to a block that has other text now may lead back
            looks = DOUBTFUL
            while place and len(seen) < looks and place not in seen:
                seen.append(place)
                known = held[place - matched : place] == wanted and held[place] != BLANK
                if known and owners[place // stride] is tenant:
                    looks = self._occurrences
                    before = matched
                    while matched < most and held[place - matched - 1] == tokens[length - matched - 1]:
                        matched += 1
                    if matched > before:
                        wanted, places = array("i", tokens[length - matched :]), []
                    places.append(place)
                place = links[place * num_sizes + rank]
            if places:
                return Match(matched, places)
        return NO_MATCH

    def after(self, places: Sequence[Place], count: int) -> list[list[int]]:
        """What followed at these places: up to `count` tokens, fewer where a text ends."""
        held, stride = self._tokens, self._stride
        lines = []
        for place in places:
            if place % stride + count <= stride:
                line = held[place : place + count].tolist()
            else:
                line = self._across(place, count)
            if line[-1] == BLANK:
                del line[line.index(BLANK) :]
            lines.append(line)
        return lines

    def _across(self, place: Place, count: int) -> list[int]:
        """From one block to the next."""
        block, offset = divmod(place, self._stride)
        line = self._tokens[place : place - offset + self._stride].tolist()
        order = self._orders[block] + 1
        for following in self.text(place).blocks[order : order + 1 + count // BLOCK]:
            begin = following * self._stride + self._overlap
            line += self._tokens[begin : begin + min(count - len(line), BLOCK)]
        return line

    def text(self, place: Place) -> Text:
        """The text a place is in."""
        text = self._texts[place // self._stride]
        assert text is not None, f"place {place} is in no text"
        return text

    def _take_block(self, text: Text, tokens: Sequence[int]) -> bool:
        """Another block. Finished texts make room for it: the tenant's own when it has its share, else the oldest."""
        tenant = text.tenant
        while tenant.num_blocks >= self._tenant_blocks or not self._free:
            finished = tenant.finished if tenant.num_blocks >= self._tenant_blocks else self._finished
            if not finished:
                return False
            self.drop(next(iter(finished)))
        block = self._free.pop()
        copied = list(tokens[max(0, text.length - self._overlap) : text.length])
        blanks = [BLANK] * (self._overlap - len(copied))
        begin = block * self._stride
        self._tokens[begin : begin + self._stride] = array("i", blanks + copied + [BLANK] * BLOCK)
        self._owners[block], self._texts[block], self._orders[block] = tenant, text, len(text.blocks)
        text.blocks.append(block)
        tenant.num_blocks += 1
        return True

    @property
    def num_tokens(self) -> int:
        """Room that is taken: 64 tokens a block."""
        return (len(self._owners) - 1 - len(self._free)) * BLOCK

    @property
    def num_bytes(self) -> int:
        """Memory when everything is full; the tables are most of it."""
        tables = self._links.nbytes + sum(heads.nbytes for heads in self._heads) + sys.getsizeof(self._tokens)
        return tables + sum(map(sys.getsizeof, (self._owners, self._texts, self._orders, self._free)))


def _sizes(least: int, most: int) -> list[int]:
    """The n of the n-grams that are filed: doubled, so that few are enough."""
    sizes = [least]
    while sizes[-1] * 2 <= min(most, MOST_SIZE):
        sizes.append(sizes[-1] * 2)
    return sizes
