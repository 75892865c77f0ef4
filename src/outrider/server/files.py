"""The page's files, read once and kept in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but this server's own files; no inline code, no frames around the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask whether it changed, every time
}


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    media_type: str
    tag: str


def load_files(folder: Path = PAGE) -> dict[str, File]:
    """By name: only what is here can be asked for."""
    paths = [path for path in folder.iterdir() if path.suffix in TYPES] if folder.is_dir() else []
    return {path.name: _file(path) for path in paths}


def _file(path: Path) -> File:
    data = path.read_bytes()
    return File(data, TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def file_response(file: File, request: Request) -> Response:
    """The file, or that the browser has it already."""
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.media_type)
