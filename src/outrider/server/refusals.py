"""Fields that OpenAI or vLLM know and this server does not, with the reason and the values that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """Why a field is refused. Null and the `harmless` values ask for nothing, and are let through."""

    reason: str
    harmless: tuple[Any, ...] = ()

    def tolerates(self, value: object) -> bool:
        """Whether the value changes nothing. 0 is not False here."""
        return value is None or any(type(value) is type(one) and value == one for one in self.harmless)

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.harmless, None], "description": f"{self.reason}; other values are refused"}


Refusals = Mapping[str, Refusal]

_TOOLS = "this server calls no tools; ask for JSON with response_format instead"
_ONE_TIER = "there is one kind of service here; leave it out, or set priority"

SHARED: Refusals = {
    "store": Refusal("answers are not stored", (False,)),
    "metadata": Refusal("answers are not stored, so there is nothing to attach metadata to", ({},)),
    "service_tier": Refusal(_ONE_TIER, ("auto", "default")),
    "safety_identifier": Refusal("name the end user with user instead"),
    "prompt_cache_key": Refusal("shared beginnings of prompts are found without a key; leave it out"),
    "prompt_cache_retention": Refusal("how long beginnings are kept is the server's choice; leave it out"),
    "best_of": Refusal("answers are not ranked; ask for several with n", (1,)),
    "suffix": Refusal("text cannot be filled in before a suffix; put all context into the prompt", ("",)),
    "use_beam_search": Refusal("beams are not supported; answers are sampled", (False,)),
    "length_penalty": Refusal("beams are not supported, and only they weigh lengths", (1, 1.0)),
    "guided_json": Refusal("give the schema in response_format instead"),
    "guided_regex": Refusal("give the pattern in regex instead"),
    "guided_grammar": Refusal("give the grammar in grammar instead"),
    "guided_choice": Refusal("write the choices as a regex, such as yes|no, instead"),
    "prompt_logprobs": Refusal("ask /v1/completions with echo and logprobs instead"),
    "skip_special_tokens": Refusal("special tokens are never part of the text", (True,)),
    "include_stop_str_in_output": Refusal("the stop text is never part of the answer", (False,)),
    "allowed_token_ids": Refusal("ban the others with banned, or use regex or grammar"),
    "bad_words": Refusal("ban token ids with banned instead", ([],)),
    "mirostat": Refusal("mirostat is not supported; use min_p or typical_p", (0,)),
}

CHAT: Refusals = {
    **SHARED,
    "tools": Refusal(_TOOLS, ([],)),
    "tool_choice": Refusal(_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Refusal(_TOOLS, (True, False)),
    "functions": Refusal(_TOOLS, ([],)),
    "function_call": Refusal(_TOOLS, ("none", "auto")),
    "audio": Refusal("this server writes text only"),
    "modalities": Refusal("this server writes text only", (["text"],)),
    "reasoning_effort": Refusal("this server has no setting for reasoning; say it in the messages"),
    "verbosity": Refusal("say in the messages how long the answer should be, or set max_tokens"),
    "prediction": Refusal("drafts come from the server's own methods; choose one with speculation.draft"),
    "web_search_options": Refusal("this server does not search the web"),
    "prompt": Refusal("a plain prompt goes to /v1/completions"),
    "echo": Refusal("echo belongs to /v1/completions", (False,)),
    "add_generation_prompt": Refusal("the model is always asked for its next turn", (True,)),
    "continue_final_message": Refusal("the model always begins a new turn", (False,)),
}

COMPLETION: Refusals = {
    **SHARED,
    "messages": Refusal("a conversation goes to /v1/chat/completions"),
    "top_logprobs": Refusal("logprobs itself is the number of alternatives in /v1/completions"),
    "max_completion_tokens": Refusal("it is called max_tokens in /v1/completions"),
    "tools": Refusal(_TOOLS, ([],)),
}

MESSAGE: Refusals = {
    "name": Refusal("the chat template has no place for names; write it into the content"),
    "tool_calls": Refusal(_TOOLS, ([],)),
    "tool_call_id": Refusal(_TOOLS),
    "function_call": Refusal(_TOOLS),
    "refusal": Refusal("put what the assistant said into content"),
    "annotations": Refusal("the model reads text only", ([],)),
    "audio": Refusal("the model reads text only"),
}

STREAM_OPTIONS: Refusals = {
    "include_obfuscation": Refusal("chunks are not padded", (False,)),
    "continuous_usage_stats": Refusal("usage comes once, at the end", (False,)),
}
