"""Tokenizers from a folder as Hugging Face lays it out: tokenizer.json says how, the files beside it name tokens.

tokenizer.json is taken at its word. Where tokenizer_config.json says add_bos_token or add_eos_token, that wins, as in
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import ModelFileError
from outrider.tokenizer.text import TextTokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: Path) -> TextTokenizer:
    """The tokenizer of a folder with tokenizer.json and whatever describes it there."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(_missing(path))
    tokenizer = tokenizer_from_json(_read(file), file)
    config = _json(path / "tokenizer_config.json")
    names = _names(path, config)
    _add_declared(tokenizer, config, names, path)
    ids = {name: _end(tokenizer, path, names, name) for name in ("bos_token", "eos_token")}
    for name, token in ids.items():
        if token is not None and name not in names:
            names[name] = tokenizer.id_to_token(token) or ""
    if isinstance(config.get("add_bos_token"), bool) or isinstance(config.get("add_eos_token"), bool):
        ends = [names.get(f"{end}_token") if config.get(f"add_{end}_token") is True else None for end in ("bos", "eos")]
        set_ends(tokenizer, *ends)
    return TextTokenizer(
        tokenizer,
        path=path,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1,
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        names=names,
        chat_template=_template(path, config),
    )


def tokenizer_from_json(text: str, path: Path) -> Tokenizer:
    """A tokenizer from the text of a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exceptions
        reason = f"its tokenizer.json cannot be used ({error}); fetch it again, or update the tokenizers package"
        raise ModelFileError(f"{path}: {reason}") from error


def set_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put these tokens around every text that is encoded with its special tokens."""
    from tokenizers.processors import TemplateProcessing

    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    known = [(piece, tokenizer.token_to_id(piece)) for piece in dict.fromkeys((bos, eos)) if piece]
    tokenizer.post_processor = TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=known)


def _missing(path: Path) -> str:
    if (path / "tokenizer.model").is_file():
        return (
            f"{path}: only a SentencePiece tokenizer.model; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r}) writes tokenizer.json"
        )
    return f"{path}: tokenizer.json is missing; fetch it from where the model came from"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{file}: cannot be read ({error}); fetch it again") from error


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise ModelFileError(f"{file}: not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: must be a JSON object, got {type(value).__name__}; fetch it again")
    return value


def _content(value: Any) -> str | None:
    """A token is written as its text, or as an object with a content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _names(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; tokenizer_config.json goes before special_tokens_map.json."""
    names = {}
    for source in (_json(path / "special_tokens_map.json"), config):
        for name in _NAMED:
            content = _content(source.get(name))
            if content is not None:
                names[name] = content
    return names


def _end(tokenizer: Tokenizer, path: Path, names: Mapping[str, str], name: str) -> int | None:
    """The id of a named token; without a name, the model's configuration may give the id itself."""
    if name in names:
        token = tokenizer.token_to_id(names[name])
        if token is None:
            raise ModelFileError(
                f"{path}: tokenizer_config.json says {name} is {names[name]!r}, which tokenizer.json does not have; "
                "the files are of two models, fetch them again"
            )
        return token
    for file in ("generation_config.json", "config.json"):
        value = _json(path / file).get(f"{name}_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and tokenizer.id_to_token(value) is not None:
            return value
    return None


def _add_declared(tokenizer: Tokenizer, config: Mapping[str, Any], names: Mapping[str, str], path: Path) -> None:
    """Tokens the configuration declares beyond tokenizer.json, with their ids; named ones become special."""
    for token, added in _declared(config, path):
        if tokenizer.token_to_id(added.content) is not None:
            continue
        (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([added])
        if tokenizer.token_to_id(added.content) != token:
            raise ModelFileError(
                f"{path}: tokenizer_config.json says {added.content!r} is token {token}, but tokenizer.json ends "
                "before it; the files are of two models, fetch them again"
            )
    known = {one.content for one in tokenizer.get_added_tokens_decoder().values()}
    missing = [piece for piece in names.values() if piece not in known and tokenizer.token_to_id(piece) is not None]
    tokenizer.add_special_tokens(missing)


def _declared(config: Mapping[str, Any], path: Path) -> list[tuple[int, AddedToken]]:
    """The entries of added_tokens_decoder, by id."""
    from tokenizers import AddedToken

    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    try:
        return sorted(
            (
                (int(token), AddedToken(one["content"], **{flag: one[flag] for flag in flags if flag in one}))
                for token, one in config.get("added_tokens_decoder", {}).items()
            ),
            key=lambda entry: entry[0],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"added_tokens_decoder in tokenizer_config.json is damaged ({error!r}); fetch it again"
        raise ModelFileError(f"{path}: {reason}") from error


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
