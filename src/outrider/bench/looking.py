"""Who answers at a URL: found out before anything is measured, so that what cannot work is said in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from outrider.bench.asking import REFUSALS, Place, ask, dicts_of, headers_of, import_httpx, message_of
from outrider.bench.traffic import Call
from outrider.errors import ConfigError, NotReadyError, OutriderError, RequestError

WARM_UP = Call(0, None, "Count from one to ten.", 16)


def base_of(url: str) -> str:
    """Where the paths of the API begin: what has no path of its own gets OpenAI's."""
    try:
        parts = urlsplit(url.strip())
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ConfigError(f"a URL is like http://127.0.0.1:8000, got {url!r}", param="url")
    return url.strip().rstrip("/") + ("" if parts.path.strip("/") else "/v1")


async def look(client: Any, place: Place) -> Place:
    """Ask the server what it is, and one question, which it must be able to answer."""
    place = _known(await _models(client, place), place)
    sample = await ask(client, place, WARM_UP, is_plain=False)
    if sample.status in (400, 422) and "stream_options" in sample.problem:
        place = replace(place, has_usage=False)
        sample = await ask(client, place, WARM_UP, is_plain=False)
    if sample.outcome != "ok":
        raise _hopeless(place, sample.status, sample.problem)
    return place


async def _models(client: Any, place: Place) -> list[dict[str, Any]]:
    """What the server says it serves; nothing from one that does not tell."""
    httpx = import_httpx()
    try:
        response = await client.get(f"{place.base}/models", headers=headers_of(place))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise NotReadyError(f"cannot reach {place.base} ({reason}); is a server running there?") from None
    try:
        content = response.json()
    except (ValueError, RecursionError):
        content = None
    if response.status_code in (401, 403):
        raise _hopeless(place, response.status_code, f"{response.status_code}: {message_of(content)}")
    found = [one for one in dicts_of(content.get("data") if isinstance(content, dict) else None) if one.get("id")]
    if not found and not place.model:
        raise RequestError(
            f"{place.base} does not list its models (it answered {response.status_code}); check --url, or name the "
            "model with --model",
            param="url",
        )
    return found


def _known(served: list[dict[str, Any]], place: Place) -> Place:
    """The place with what its list of models says of it."""
    if not served:
        return place
    card = next((one for one in served if one["id"] == place.model), served[0])
    place = replace(place, model=place.model or str(card["id"]))
    if card.get("owned_by") != "outrider":
        return place
    methods = card.get("methods")
    drafts = isinstance(methods, list) and any(method != "none" for method in methods)
    is_chat = place.is_chat and card.get("chat") is not False
    return replace(place, model=str(card["id"]), is_own=True, drafts=drafts, is_chat=is_chat)


def _hopeless(place: Place, status: int, problem: str) -> OutriderError:
    """Why nothing can be measured there."""
    if status in (401, 403):
        return RequestError(f"{place.base} wants a valid key ({problem.rstrip(': ')}); give it with --api-key")
    if status in REFUSALS:
        return NotReadyError(f"{place.base} takes no requests ({problem})")
    return RequestError(f"{place.base} does not answer a question ({problem}); check --url and --model")
