"""Keys of the HTTP API: who may call.

Decides the form of a key file, how a presented key is compared, and which paths need none. Refuses
to know what is served.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcourier.errors import ConfigError
from kvcourier.openai import ErrorBody, ErrorDetail

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""What load balancers and scrapers ask, as in vLLM. They show no request; of a router they show the
HTTP addresses of its instances."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys of which any opens the API. Only their digests are kept."""

    digests: tuple[bytes, ...] = field(repr=False)

    def allows(self, key: bytes) -> bool:
        """Whether this is one of them; takes as long whichever it is, and however near it comes."""
        digest = hashlib.sha256(key).digest()
        # A list, not a generator: every key is compared.
        return any([hmac.compare_digest(digest, known) for known in self.digests])


def read_api_keys(path: Path) -> list[str]:
    """The keys in a file, one a line; empty lines and lines that begin with # are none.

    Raises:
        ConfigError: the file cannot be read, has no key, or one that no header can carry.
    """
    try:
        lines = [line.strip() for line in path.read_text("ascii").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a file with a key a line: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path}: expected a key a line, found none")
    for number, line in enumerate(lines, 1):
        if line in keys and not all("!" <= char <= "~" for char in line):
            # Not shown: it is a secret all the same.
            raise ConfigError(f"{path}, line {number}: expected a key without blanks")
    return keys


def api_keys(keys: list[str]) -> ApiKeys:
    """What opens an API, by these keys."""
    return ApiKeys(tuple(hashlib.sha256(key.encode()).digest() for key in keys))


def bearer(key: str) -> tuple[str, str]:
    """The header, name and value, that presents a key."""
    return "authorization", f"Bearer {key}"


class RequireApiKey:
    """ASGI middleware: HTTP 401 for a call without one of the keys, before its body is read.

    Args:
        keys: open everything but the paths that have keys of their own; None: no key is needed.
        by_prefix: keys of the paths that begin so.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys | None, by_prefix: Mapping[str, ApiKeys] | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._by_prefix = dict(by_prefix or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        is_open = scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS
        keys = None if is_open else self._keys_of(str(scope.get("path", "")))
        if keys is None or _presents(scope, keys):
            await self._app(scope, receive, send)
            return
        detail = ErrorDetail(
            "Expected a valid API key in the header Authorization: Bearer KEY.",
            "invalid_request_error",
            None,
            "invalid_api_key",
        )
        content = msgspec.json.encode(ErrorBody(detail))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"www-authenticate", b"Bearer"),
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})

    def _keys_of(self, path: str) -> ApiKeys | None:
        own = (keys for prefix, keys in self._by_prefix.items() if path.startswith(prefix))
        return next(own, self._keys)


def _presents(scope: Scope, keys: ApiKeys) -> bool:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, key = given[0].partition(b" ")
    return bool(scheme.lower() == b"bearer") and keys.allows(key.strip(b" "))
