"""What a server remembers from one request to the next, and of which clients.

Memory is the past text that `suffix` drafts from and the prefix cache. The engine keys both by a request's tenant. With
API keys the tenant is the key's, so memory serves its own key only. Without keys the server cannot distinguish clients:
memory is off, and every call gets a tenant of its own, unless the server listens on loopback or was started with
`share_memory`. What a tenant of one call leaves behind is never found again. It is dropped as the text of any tenant
is: past text has a fixed room and drops the oldest first, pages without a holder are taken when others need them.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from ipaddress import ip_address

from outrider.server.settings import ServerSettings

OFF = (
    "nothing is remembered from one request to the next: without API keys the server cannot distinguish clients; "
    "give --api-key to remember by key, or --share-memory to let all clients share"
)


def is_loopback(address: str) -> bool:
    """Whether a server that listens at this IP address is reached from its own machine only."""
    return ip_address(address.partition("%")[0]).is_loopback


def at_address(settings: ServerSettings, address: str) -> ServerSettings:
    """The settings of a server that listens here: on loopback all clients are of one machine and share memory."""
    return replace(settings, share_memory=settings.share_memory or is_loopback(address))


def is_off(settings: ServerSettings) -> bool:
    return not settings.api_keys and not settings.share_memory


def tenant_for(owner: str, settings: ServerSettings) -> str:
    """The tenant of one call's requests: the client's, or one that no other call has."""
    return f"\0once-{secrets.token_hex(16)}" if is_off(settings) else owner
