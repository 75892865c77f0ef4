"""Tokenizers from a folder as Hugging Face lays it out: tokenizer.json says how, the files beside it name tokens.

tokenizer.json is taken at its word, also for the tokens around a text: add_bos_token and add_eos_token of
tokenizer_config.json mean nothing beside it, as in transformers 5. Which tokens are added, and which of them are
special, follows transformers, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelFileError
from outrider.jsonfile import read_json, read_text
from outrider.tokenizer.library import blaming, tokenizer_from_json
from outrider.tokenizer.text import TextTokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_MAX_ID = 2**32 - 1  # what the library can be asked for


def tokenizer_from_folder(path: Path) -> TextTokenizer:
    """The tokenizer of a folder with tokenizer.json and whatever describes it there."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(_missing(path))
    tokenizer = tokenizer_from_json(read_text(file), file)
    config = _json(path / "tokenizer_config.json")
    settings = _settings(path, config)
    named = _named(settings, path)
    _add_tokens(tokenizer, settings, named, path)
    names = {name: one.content for name, one in named.items()}
    ids = {name: _end(tokenizer, path, names, name) for name in ("bos_token", "eos_token")}
    for name, token in ids.items():
        if token is not None and name not in names:
            names[name] = tokenizer.id_to_token(token) or ""
    return TextTokenizer(
        tokenizer,
        path=path,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1,
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        names=names,
        chat_template=_template(path, config),
    )


def _missing(path: Path) -> str:
    if (path / "tokenizer.model").is_file():
        return (
            f"{path}: only a SentencePiece tokenizer.model; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r}) writes tokenizer.json"
        )
    return f"{path}: tokenizer.json is missing; fetch it from where the model came from"


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    return read_json(file) if file.is_file() else {}


def _settings(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said about tokens. special_tokens_map.json is of older times: it counts, and then first, only where
    tokenizer_config.json has no added_tokens_decoder."""
    if config.get("added_tokens_decoder") is not None:
        return dict(config)
    return {**config, **_json(path / "special_tokens_map.json")}


def _named(settings: Mapping[str, Any], path: Path) -> dict[str, AddedToken]:
    """Special tokens by name: bos_token and the like, and those of extra_special_tokens where it gives names."""
    extra = settings.get("extra_special_tokens")
    given = {name: value for name, value in settings.items() if name.endswith("_token")}
    given.update(extra if isinstance(extra, dict) else {})
    tokens = {name: _special(value, path) for name, value in given.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _extra(settings: Mapping[str, Any], path: Path) -> list[AddedToken]:
    """Special tokens without a name."""
    extra, older = (settings.get(f"{kind}_special_tokens") for kind in ("extra", "additional"))
    given = extra if extra and isinstance(extra, list) else older
    tokens = [_special(value, path) for value in given] if isinstance(given, list) else []
    return [token for token in tokens if token is not None]


def _special(value: Any, path: Path) -> AddedToken | None:
    """A special token is written as its text, or as an object with a content."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        return None
    return _added({**(value if isinstance(value, dict) else {}), "content": content, "special": True}, path)


def _added(given: Mapping[str, Any], path: Path) -> AddedToken:
    from tokenizers import AddedToken

    with blaming(path, "a token in tokenizer_config.json is damaged; fetch it again"):
        return AddedToken(given["content"], **{flag: given[flag] for flag in _FLAGS if flag in given})


def _end(tokenizer: Tokenizer, path: Path, names: Mapping[str, str], name: str) -> int | None:
    """The id of a named token; without a name, the model's configuration may give the id itself."""
    if name in names:
        return tokenizer.token_to_id(names[name])
    for file in ("generation_config.json", "config.json"):
        value = _json(path / file).get(f"{name}_id")
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ID:
            continue
        if tokenizer.id_to_token(value) is not None:
            return value
    return None


def _add_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], named: Mapping[str, AddedToken], path: Path) -> None:
    """Tokens beyond tokenizer.json, or with other flags: first those declared with an id, then named and extra ones
    that nothing has added yet. What has a name is special."""
    declared = _declared(settings, path)
    own = tokenizer.get_added_tokens_decoder()
    special = {one.content for one in named.values()}
    tokens = declared if settings.get("added_tokens_decoder") is not None else own
    for one in tokens.values():
        one.special = one.special or one.content in special
    with blaming(path, "its added tokens cannot be used; fetch it again"):
        tokenizer.add_tokens([tokens[token] for token in sorted(tokens)])
    for token, one in declared.items():
        if tokenizer.token_to_id(one.content) != token:
            raise ModelFileError(
                f"{path}: tokenizer_config.json says {one.content[:80]!r} is token {token}, but tokenizer.json has "
                "another there or ends before it; the files are of two models, fetch them again"
            )
    _check_ends(tokenizer, named, path)
    known = {one.content for one in (*own.values(), *tokens.values())}
    new = [one for one in (*named.values(), *_extra(settings, path)) if one.content not in known]
    with blaming(path, "its special tokens cannot be used; fetch it again"):
        tokenizer.add_tokens(new)


def _check_ends(tokenizer: Tokenizer, named: Mapping[str, AddedToken], path: Path) -> None:
    """A new token is none the model has learned, and no text could begin or end with it."""
    for name in ("bos_token", "eos_token"):
        if name in named and tokenizer.token_to_id(named[name].content) is None:
            raise ModelFileError(
                f"{path}: tokenizer_config.json says {name} is {named[name].content[:80]!r}, which tokenizer.json does "
                "not have; the files are of two models, fetch them again"
            )


def _declared(settings: Mapping[str, Any], path: Path) -> dict[int, AddedToken]:
    """The entries of added_tokens_decoder, by id."""
    given = settings.get("added_tokens_decoder")
    with blaming(path, "added_tokens_decoder in tokenizer_config.json is damaged; fetch it again"):
        return {} if given is None else {int(token): _added(one, path) for token, one in given.items()}


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template; where there are several, the one named default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    given = config.get("chat_template")
    if isinstance(given, list):
        with blaming(path, "chat_template in tokenizer_config.json must be a list of named ones; fetch it again"):
            given = {one["name"]: one["template"] for one in given}
    template = given.get("default") if isinstance(given, dict) else given
    if template is not None and not isinstance(template, str):
        raise ModelFileError(
            f"{path}: chat_template in tokenizer_config.json must be text, got {template!r:.60}; fetch it again"
        )
    return template
