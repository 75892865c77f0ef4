"""The application: its paths, and the layers around them.

Ledger      one log line and one count per request; an answer to the unexpected
CORS        only for origins that were named
Guard       host, key, body limits
paths       completions.py and paths.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from outrider import __version__
from outrider.errors import OutriderError
from outrider.server import completions, paths
from outrider.server.description import describe
from outrider.server.errors import routing_response
from outrider.server.guard import Guard
from outrider.server.ledger import Ledger
from outrider.server.metrics import HttpMetrics
from outrider.server.service import Service
from outrider.server.settings import ServerSettings
from outrider.server.worker import Worker


def create_app(worker: Worker, settings: ServerSettings) -> FastAPI:
    """The HTTP side of a worker that the caller starts and closes."""
    service, http = Service(worker, settings), HttpMetrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pulse = asyncio.create_task(http.measure_delay())
        try:
            yield
        finally:
            pulse.cancel()
            with suppress(asyncio.CancelledError):
                await pulse

    app = FastAPI(
        title="Outrider", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    routers = (
        completions.routes(service),
        paths.lookups(service),
        paths.tokens(service),
        paths.watching(service, http),
        paths.page(),
    )
    for router in routers:
        app.include_router(router)
    routes = [route for router in routers for route in router.routes]
    app.add_exception_handler(OutriderError, service.refuse)
    app.add_exception_handler(HTTPException, partial(_not_routed, routes))
    _surround(app, settings, http, {getattr(route, "path", "") for route in routes})
    app.openapi = cache(lambda: describe(app))  # type: ignore[method-assign]
    return app


def _surround(app: FastAPI, settings: ServerSettings, http: HttpMetrics, paths: Collection[str]) -> None:
    """The layers, from the inside."""
    app.add_middleware(Guard, settings=settings)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Ledger, metrics=http, paths=paths)


async def _not_routed(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for nothing else"
    response = routing_response(error, request.url.path)
    if error.status_code == 405:  # the router names the methods of one route, and a path may have several
        matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
        methods = {method for route in matching for method in getattr(route, "methods", ())}
        response.headers["Allow"] = ", ".join(sorted(methods))
    return response
