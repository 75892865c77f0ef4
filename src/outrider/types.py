"""The nouns of the engine: Request, SamplingParams, Job, Batch, Drafts, Scores, Verdicts, Event (and Result).

Drafts, Scores and Verdicts are one struct of arrays per round. Counts are known on the host; tokens, rows,
accepted lengths and next tokens are arrays of whatever library the backend computes with, and may stay on a device.
This module holds data only; the loop is in `engine/loop.py`.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Any, Literal, NamedTuple, NewType, Protocol

from outrider.checks import check_collection, check_number, check_whole
from outrider.errors import EmptyPromptError, OutriderError, RequestError
from outrider.metrics import Statistics

Array = Any  # numpy.ndarray or torch.Tensor: the sampling math is written once, against the array API standard
Slot = NewType("Slot", int)  # names one sequence inside a backend
Rule = Literal["rejection", "coupled"]
FORCED = "forced"  # the drafter of what a constraint leaves no choice about
MAX_LOGPROBS = 20  # alternatives of a token that a request may ask for
Prompt = str | Sequence[int]
LogitsProcessor = Callable[[Sequence[int], Array], Array]  # (tokens so far, row [V]) -> row [V]
# (token id, text that may be shown now) -> False to stop after this token
OnToken = Callable[[int, str], bool | None]


class TokenLogprob(NamedTuple):
    """What the target thought of a token, before any control: natural logarithms of probabilities."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens there, best first, as many as were asked for


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of an answer must look like. Made by `json`, `json_schema`, `regex` or `grammar`."""

    kind: Literal["json", "json_schema", "regex", "grammar"]
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json", "json_schema", "regex", "grammar"):
            raise RequestError(
                f"a constraint is json, json_schema, regex or grammar, got {self.kind!r}", param="constraint"
            )
        if not isinstance(self.text, str) or (self.kind != "json" and not self.text):
            raise RequestError(f"a {self.kind} constraint takes its text, got {self.text!r}", param="constraint")

    @classmethod
    def json(cls) -> Constraint:
        """Any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Constraint:
        """JSON that a schema allows."""
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole (Rust's syntax, without look-around)."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, rules: str) -> Constraint:
        """Text of a context-free grammar in Lark's syntax, as llguidance reads it; it begins with `start`."""
        return cls("grammar", rules)


class FinishReason(StrEnum):
    """Why a request ended. An error is raised instead."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The target distribution of a request: what is done to a row of logits before a token is drawn.

    Applied in this order: processors, repetition penalty (prompt and output), presence and frequency penalties
    (output), logit bias, banned ids; then temperature; then top-k, top-p, min-p, typical-p. Temperature 0 takes
    the argmax after the first group. `accept="auto"` is `coupled` when a seed is given, else `rejection`.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned: Collection[int] = ()
    processors: Collection[LogitsProcessor] = ()
    seed: int | None = None
    accept: Literal["auto", "rejection", "coupled"] = "auto"

    def __post_init__(self) -> None:
        # The limits are far outside of any use and keep float32 finite.
        check_number(self.temperature, "temperature", 0.0, 1e6, RequestError)
        if self.top_k is not None:
            check_whole(self.top_k, "top_k", 1, RequestError, hint=" (None is off)")
        check_number(self.top_p, "top_p", 0.0, 1.0, RequestError, above=True)
        check_number(self.min_p, "min_p", 0.0, 1.0, RequestError)
        check_number(self.typical_p, "typical_p", 0.0, 1.0, RequestError, above=True)
        check_number(self.repetition_penalty, "repetition_penalty", 1e-6, 1e6, RequestError)
        check_number(self.presence_penalty, "presence_penalty", -1e6, 1e6, RequestError)
        check_number(self.frequency_penalty, "frequency_penalty", -1e6, 1e6, RequestError)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias maps token ids to numbers, got {self.logit_bias!r}", param="logit_bias")
        for token, bias in self.logit_bias.items():
            if bias != -math.inf:  # minus infinity bans the token, a finite number shifts it
                check_number(bias, f"logit_bias[{token}]", -1e6, 1e6, RequestError)
        check_collection(self.banned, "banned", "token ids", RequestError)
        check_collection(self.processors, "processors", "functions", RequestError)
        if not all(map(callable, self.processors)):
            raise RequestError(f"processors takes a list of functions, got {self.processors!r}", param="processors")
        if self.seed is not None:
            check_whole(self.seed, "seed", -(1 << 63), RequestError)
            if self.seed >= 1 << 64:
                raise RequestError(f"seed must fit into 64 bits, got {self.seed}", param="seed")
        if self.accept not in ("auto", "rejection", "coupled"):
            raise RequestError(f"accept must be auto, rejection or coupled, got {self.accept!r}", param="accept")

    @property
    def rule(self) -> Rule:
        if self.accept != "auto":
            return self.accept
        return "rejection" if self.seed is None else "coupled"

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked: a prompt, when to stop, how to sample, how to speculate.

    `max_tokens=None` answers until the context ends; before `min_tokens` nothing but a `constraint` ends it. `logprobs`
    asks for the chosen tokens' (and that many alternatives'), `prompt_logprobs` for those of the prompt. `method`,
    `width` and `tree` say how to speculate: by which drafter, how many tokens a round are drafted at most (0 is plain
    decoding) and whether they may branch; None leaves it to the engine. `max_width` only caps what the engine chooses.
    `choice` is the index of an answer among several with one seed. What is kept of a request to make later ones quicker
    serves its `tenant` only. `priority` and `deadline_s` (for the last token) are for policies that heed them.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline_s: float | None = None
    method: str | None = None
    width: int | None = None
    max_width: int | None = None
    tree: bool | None = None
    choice: int = 0
    on_token: OnToken | None = None
    request_id: str | None = None
    tenant: str = ""
    priority: Literal["low", "normal", "high"] = "normal"

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Sequence) or isinstance(self.prompt, (bytes, bytearray)):
            cure = "; pass its tolist()" if hasattr(self.prompt, "tolist") else ""
            kind = type(self.prompt).__name__
            raise RequestError(f"a prompt is text or a list of token ids, got {kind}{cure}", param="prompt")
        if len(self.prompt) == 0:
            raise EmptyPromptError("the prompt is empty; give at least one token", param="prompt")
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling takes SamplingParams, got {type(self.sampling).__name__}", param="sampling")
        if self.max_tokens is not None:
            check_whole(self.max_tokens, "max_tokens", 1, RequestError)
        check_whole(self.min_tokens, "min_tokens", 0, RequestError)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower it", param="min_tokens"
            )
        if self.logprobs is not None:
            check_whole(self.logprobs, "logprobs", 0, RequestError)
            check_number(self.logprobs, "logprobs", 0, MAX_LOGPROBS, RequestError)
        if not isinstance(self.prompt_logprobs, bool):
            raise RequestError(
                f"prompt_logprobs is True or False, got {self.prompt_logprobs!r}", param="prompt_logprobs"
            )
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise RequestError(
                f"constraint takes a Constraint, got {type(self.constraint).__name__}; use Constraint.json_schema(...)",
                param="constraint",
            )
        if self.constraint is not None and self.ignore_eos:
            raise RequestError(
                "a constraint says where the answer ends, and ignore_eos would not let it; drop one", param="ignore_eos"
            )
        check_collection(self.stop, "stop", "strings", RequestError)
        for text in self.stop:
            if not isinstance(text, str) or text == "":
                raise RequestError(f"stop takes non-empty strings, got {text!r}", param="stop")
        check_collection(self.stop_ids, "stop_ids", "token ids", RequestError)
        if self.deadline_s is not None:
            check_number(self.deadline_s, "deadline_s", 0.0, math.inf, RequestError)
        for name in ("width", "max_width"):
            if getattr(self, name) is not None:
                check_whole(getattr(self, name), name, 0, RequestError)
        if self.width is not None and self.max_width is not None:
            raise RequestError("width fixes what max_width caps; give one of them", param="max_width")
        if self.tree is not None and not isinstance(self.tree, bool):
            raise RequestError(f"tree is True, False or None, got {self.tree!r}", param="tree")
        if self.method is not None and not isinstance(self.method, str):
            raise RequestError(f"method takes the name of a method, got {self.method!r}", param="method")
        check_whole(self.choice, "choice", 0, RequestError)
        if self.on_token is not None and (not callable(self.on_token) or iscoroutinefunction(self.on_token)):
            raise RequestError(f"on_token takes a plain function, got {self.on_token!r}", param="on_token")
        if self.request_id is not None and not isinstance(self.request_id, str):
            raise RequestError(f"request_id takes text, got {self.request_id!r}", param="request_id")
        if not isinstance(self.tenant, str):
            raise RequestError(f"tenant takes text, got {self.tenant!r}", param="tenant")
        if self.priority not in ("low", "normal", "high"):
            raise RequestError(f"priority is low, normal or high, got {self.priority!r}", param="priority")

    @classmethod
    def of(
        cls, prompt: Prompt | Request, settings: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> Request:
        """A request from a prompt and flat settings (`max_tokens=..., temperature=...`); unknown names are refused.

        None is "not given"; `defaults` fill in what was not, unless `sampling` comes as a whole.
        """
        settings = {name: value for name, value in settings.items() if value is not None}
        if isinstance(prompt, Request):
            if settings:
                raise RequestError(
                    f"{sorted(settings)[0]} was given beside a Request; set it in the Request",
                    param=sorted(settings)[0],
                )
            return prompt
        if "sampling" not in settings:
            settings = {**(defaults or {}), **settings}
        own = {f.name for f in fields(cls)} - {"prompt"}
        sampling = {f.name for f in fields(SamplingParams)}
        for name in settings:
            if name not in own and name not in sampling:
                near = get_close_matches(name, own | sampling, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(own | sampling))}"
                raise RequestError(f"{name} is not a setting{hint}", param=name)
        mine = {name: value for name, value in settings.items() if name in own}
        drawn = {name: value for name, value in settings.items() if name in sampling}
        if drawn and "sampling" in mine:
            raise RequestError(f"{sorted(drawn)[0]} was given beside sampling=; set it there", param=sorted(drawn)[0])
        if isinstance(mine.get("stop"), str):
            mine["stop"] = (mine["stop"],)
        if drawn:
            mine["sampling"] = SamplingParams(**drawn)
        return cls(prompt=prompt, **mine)


class TextOut(Protocol):
    """Text of the emitted tokens, as far as it may be shown (see `tokenizer.TextStream`)."""

    stopped: bool

    @property
    def text(self) -> str: ...

    def push(self, token: int, *, may_stop: bool = True) -> str: ...

    def finish(self) -> str: ...


class Grammar(Protocol):
    """What may follow the emitted tokens of one answer (see `sampling.grammar`). It looks ahead and goes back by
    itself: only `advance` moves it."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow."""

    def allowed(self, drafted: Sequence[int]) -> Array | None:
        """Which tokens may follow the emitted ones and these drafts, booleans of numpy's [V]; None where they break
        it."""

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write them; mostly none."""

    def advance(self, token: int) -> None:
        """The token was emitted."""


_job_ids = itertools.count()


@dataclass(slots=True, eq=False)
class Job:
    """A request being worked on. `cached` tokens in the target's cache chase `len(tokens)`.

    Prompt chunk, decode, draft and replay are all that one difference:

        tokens  [ prompt ............ | emitted ...... ]
        cached  [ ................ )                       fed next: tokens[cached:] and this round's drafts

    After every round of a job that has its prompt behind it, the cache holds exactly tokens[:-1].
    """

    request: Request
    request_id: str
    params: SamplingParams  # the request's, with collections of its own
    tokens: list[int]
    num_prompt: int
    seed: int
    rule: Rule
    words: tuple[int, int]  # the seed as noise.seed_words gives it
    limit: int  # the length at which the answer ends: max_tokens or the context
    stop_ids: frozenset[int]
    arrival: float
    drafters: tuple[str, ...] = ()  # who drafts: the first that has something to say; nobody for plain
    width: int | None = None  # what was asked for, 0 for plain; None lets the engine choose
    max_width: int | None = None  # the most it may choose
    tree: bool | None = None  # whether drafts may branch; None lets the engine choose
    deadline: float | None = None
    text: TextOut | None = None
    min_length: int = 0  # before this length no stop id is drawn and no stop string is looked for
    grammar: Grammar | None = None
    logprobs: list[TokenLogprob] | None = None  # of the emitted tokens, where asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of the prompt's tokens, as far as they were read
    counts: dict[int, int] | None = None  # token -> times emitted, prompt tokens with 0; only for penalties
    slot: Slot | None = None
    cached: int = 0
    saved: dict[str, Any] | None = None  # what the target held, while the job waits without a slot (swap, snapshots)
    started: float | None = None  # when it was first let in
    first_token: float | None = None  # when it had its first token
    statistics: Statistics = field(default_factory=Statistics)
    sink: Callable[[Event], None] | None = None  # takes the events, on the engine's thread
    on_done: Callable[[], None] | None = None  # called once the job is over, on the engine's thread
    wanted: tuple[str, ...] = ()  # drafters that propose in this round; the others need not read along
    cancelled: bool = False  # set from any thread, read once a round
    finish_reason: FinishReason | None = None
    result: Result | None = None
    error: BaseException | None = None
    id: int = field(default_factory=lambda: next(_job_ids))

    def __repr__(self) -> str:
        """Without its text: it may stand in an error that another caller reads."""
        return f"Job({self.request_id})"

    @property
    def is_repeatable(self) -> bool:
        """Whether the caller can run the same noise again: an explicit seed under `rejection`.

        Text that another request produced may have been made by the noise that judges this one. A drafter that
        proposed it would break the law, so no drafter may use what it learned or stored from other requests here.
        """
        return self.rule == "rejection" and self.params.seed is not None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def with_tokens(self, tokens: list[int]) -> Job:
        """A copy that has other tokens behind its prompt."""
        twin = copy.copy(self)
        twin.tokens = tokens
        if self.counts is not None:
            twin.counts = dict.fromkeys(self.tokens[: self.num_prompt], 0)
            for token in twin.output:
                twin.counts[token] = twin.counts.get(token, 0) + 1
        return twin


class Ask(NamedTuple):
    """What one drafter is asked for: at most `width` tokens, which may branch if `tree`."""

    drafter: str
    width: int
    tree: bool = False


Asks = tuple[Ask, ...]  # of one job: drafters in turn, until one has something to propose


class Ended(NamedTuple):
    """A job that ended without taking part in a pass: cancelled, past its deadline, or failed at admission."""

    job: Job
    reason: FinishReason | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class Batch:
    """One pass in integers, final once the scheduler returns it: which jobs prefill, which decode, how much fits.

    `room[b]` is the number of drafts that fit for decode job b: the answer's end, the target's rewind, the token budget
    and the free pages are all taken into account, and the sum over the batch fits.
    """

    prefill: list[Job]
    chunks: list[int]  # tokens each prefill job is fed; no row is wanted
    decode: list[Job]
    room: list[int]
    fallbacks: list[tuple[Job, str]] = field(default_factory=list)  # which jobs have less room than wanted, and why
    ended: list[Ended] = field(default_factory=list)
    preempted: list[tuple[Job, str]] = field(default_factory=list)  # which jobs lost their slot, and how
    admitted: list[Job] = field(default_factory=list)

    @property
    def jobs(self) -> list[Job]:
        return self.prefill + self.decode

    def select(self, jobs: Collection[Job]) -> Batch:
        """The same pass for some of its jobs."""
        prefill = [index for index, job in enumerate(self.prefill) if job in jobs]
        decode = [index for index, job in enumerate(self.decode) if job in jobs]
        return Batch(
            [self.prefill[index] for index in prefill],
            [self.chunks[index] for index in prefill],
            [self.decode[index] for index in decode],
            [self.room[index] for index in decode],
            [(job, reason) for job, reason in self.fallbacks if job in jobs],
        )


class Watch(Protocol):
    """Measures how long the device spends on drafting, without waiting for it."""

    def seconds(self) -> float:
        """Seconds of drafting. Call it when the verdict is on the host."""


@dataclass(slots=True)
class DeviceDrafts:
    """What a draft on the target's own device adds to its proposals, so that nobody waits for the host.

    `drawn_from` says that the engine's own sampling drew them, from rows of so many tokens, so there is nothing to
    check. Such drafts may be deferred: their values stay on the device, and the host gets them with the verdict; how
    long they took is measured there, too (`watch`). Who judges them may call `follow` with how many of each chain
    stay, what comes next, and the target's hidden states, all on the device: the draft goes on from there before the
    host has looked, and `follow` returns what it drew, a row for each job. Drafts that are taken from that name it as
    their `source`.
    """

    drawn_from: int = 0
    is_deferred: bool = False
    watch: Watch | None = None
    follow: Callable[[Array, Array, Mapping[int, Array]], Array | None] | None = None
    may_be_queued: bool = False  # rounds like this can be, and take less then
    source: Array | None = None  # [jobs, steps]


@dataclass(slots=True)
class Drafts:
    """The proposals of a round, job after job: `counts[b]` tokens belong to job b.

    A proposal is a chain, or a tree where `parents` has an entry for the job: for each of its tokens the index of the
    one it follows, -1 for the job's last token. Parents come before their children, siblings in the order they were
    drawn, which is the order they are judged in.

        tokens   a  b  c  d        a or b, c after a, d after c
        parents -1 -1  0  2

    `probs` are the rows the tokens were drawn from (given their earlier siblings), a one-hot row where a token was not
    sampled; None says that all are one-hot. `makers` names who drafted for each job ("" for nobody); `steps` counts
    passes of the draft; `fallbacks` says where width was lost, and why; `faults` names the jobs (by index) that the
    draft failed. `matched`, of drafters that look text up: how many tokens before each proposal match the place found.
    `borrowed` names the jobs (by index) whose proposal holds text of another request: refused ones are hidden.
    `device` is what a draft on the target's own device adds.
    """

    counts: list[int]
    tokens: Array  # [N] integers
    probs: Array | None = None  # [N, V]
    parents: dict[int, list[int]] = field(default_factory=dict)
    makers: list[str] = field(default_factory=list)
    steps: int = 0
    fallbacks: list[tuple[Job, str]] = field(default_factory=list)
    faults: dict[int, OutriderError] = field(default_factory=dict)
    matched: list[int] = field(default_factory=list)
    borrowed: set[int] = field(default_factory=set)
    device: DeviceDrafts = field(default_factory=DeviceDrafts)
    _proposals: list[list[int]] | None = None

    def proposals(self) -> list[list[int]]:
        """The drafted tokens per job, on the host. Brought there once: the tokens must be final."""
        if self._proposals is None:
            tokens, self._proposals, start = self.tokens.tolist(), [], 0
            for count in self.counts:
                self._proposals.append(tokens[start : start + count])
                start += count
        return self._proposals

    def select(self, members: Sequence[int], integers: Callable[[Sequence[int]], Array]) -> Drafts:
        """The drafts of some jobs (by index), on the host. `integers` makes an array of the backend's library."""
        proposals, starts = self.proposals(), [0, *itertools.accumulate(self.counts)]
        rows = [row for index in members for row in range(starts[index], starts[index + 1])]
        return Drafts(
            [self.counts[index] for index in members],
            integers([token for index in members for token in proposals[index]]),
            None if self.probs is None else self.probs[integers(rows), ...],
            {place: self.parents[index] for place, index in enumerate(members) if index in self.parents},
            [self.makers[index] for index in members] if self.makers else [],
            faults={place: self.faults[index] for place, index in enumerate(members) if index in self.faults},
            borrowed={place for place, index in enumerate(members) if index in self.borrowed},
        )

    def ancestors(self, index: int) -> list[list[int]]:
        """For each row of a job the drafted tokens before it: nothing first, then up to each of its drafts."""
        proposal, parents = self.proposals()[index], self.parents.get(index)
        if parents is None:
            return [proposal[:end] for end in range(len(proposal) + 1)]
        lines: list[list[int]] = [[]]
        for token, parent in zip(proposal, parents, strict=True):
            lines.append([*lines[parent + 1], token])
        return lines


@dataclass(slots=True)
class Scores:
    """The target's rows of a pass, job after job: `counts[b]` rows belong to deciding job b.

    Row 0 is the target's opinion after the job's own tokens, row i + 1 after draft i: it judges what follows there, and
    the one after the last kept draft gives the next token.
    """

    counts: list[int]
    logits: Array  # [R, V]
    fed: list[int] = field(default_factory=list)  # tokens the pass was fed for each job of the batch
    hidden: dict[int, Array] = field(default_factory=dict)  # layer -> [tokens fed, width], where asked for
    read: list[tuple[Job, Array]] = field(default_factory=list)  # rows [n, V] after a job's next n tokens, if it asked


@dataclass(slots=True)
class Verdicts:
    """What the judge decided: `accepted[b]` leading drafts of job b stay, then comes `next[b]`.

    A job with a row per draft and no bonus row (a target that cannot rewind) has no next token when all are accepted.
    Of a tree, `paths` says which drafts stay, from the root down. `faults` names the jobs whose rows were unusable.
    `seconds` are the device's own times of drafting and of the rest of the round, where passes are prelaunched.
    `is_first`: a kernel was compiled or a graph captured in this round. `missed_prelaunch`: the pass could have been
    prelaunched but was not, so its time is an upper bound.
    """

    accepted: Array  # [B]
    next: Array  # [B]
    faults: dict[int, OutriderError] = field(default_factory=dict)
    paths: dict[int, list[int]] = field(default_factory=dict)  # job -> indices of its drafts
    seconds: tuple[float, float] | None = None
    is_first: bool = False
    missed_prelaunch: bool = False

    def kept(self, index: int) -> Sequence[int]:
        """Which drafts of a job stay, in order."""
        path = self.paths.get(index)
        return range(int(self.accepted[index])) if path is None else path


@dataclass(slots=True)
class Event:
    """What a caller sees of one round: the emitted tokens and where they came from.

    The first `accepted` tokens were drafted and kept; the one after them, if any, is the replacement of a refused
    draft, or the bonus when nothing was drafted after the last one kept, or a plain token when nothing was drafted at
    all. `parents` is there when the drafts were a tree (see `Drafts`). Refused drafts from the text of another request
    are left out of `drafts`. The last event of a request has its `result`.
    """

    request_id: str
    tokens: list[int]
    text: str
    drafts: list[int]
    accepted: int
    parents: list[int] | None = None
    result: Result | None = None
    pieces: list[str] = field(default_factory=list)  # what each token added to the text
    logprobs: list[TokenLogprob] | None = None  # of the tokens, where asked for


@dataclass(frozen=True, slots=True)
class Result:
    """The answer. `seed` and `rule` together repeat the run; stop and EOS ids are in `token_ids`, not in `text`."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    seed: int
    rule: Rule
    statistics: Statistics
    logprobs: list[TokenLogprob] | None = None  # of `token_ids`
    prompt_logprobs: list[TokenLogprob | None] | None = None  # of the prompt; nothing comes before its first token
