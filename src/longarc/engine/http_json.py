"""JSON over HTTP to an engine's server: what goes wrong on the way becomes an `EngineError` that says what it was."""

import json
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from longarc.errors import EngineError

_METRIC = re.compile(r"^(?P<name>[\w:]+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)
_SHOWN_CHARS = 600
"""Of a server's own error message."""


class HttpJson:
    """One server."""

    def __init__(
        self,
        url: str,
        *,
        socket: str | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Talk to ``url``, through a Unix socket where one is given.

        Args:
            url: scheme and host; of a Unix socket any host will do.
            socket: path of a Unix socket.
            api_key: what the server was started with (``--api-key``), if anything.
            transport: replaces the network, for tests.
        """
        self.where = url if socket is None else f"unix:{socket}"
        if transport is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits)
        # No proxies from the environment, and no time-outs: how long a completion takes is the caller's business.
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            transport=transport,
            timeout=None,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """Return the JSON that a path answers with.

        Raises:
            EngineError: the server cannot be reached, refuses, or answers something else.
        """
        return self._decoded(path, await self._request("GET", path, None, None))

    async def text(self, path: str) -> str:
        """Return what a path answers with."""
        return (await self._request("GET", path, None, None)).text

    async def post(
        self, path: str, body: object = None, *, query: Mapping[str, str] | None = None
    ) -> Any:
        """Send JSON; return the JSON that comes back, or None where nothing does.

        Raises:
            EngineError: the server cannot be reached, refuses, or answers something else.
        """
        response = await self._request("POST", path, body, query)
        return self._decoded(path, response) if response.content else None

    async def events(self, path: str, body: object) -> AsyncGenerator[Any]:
        """Send JSON; yield the JSON of each server-sent event until ``[DONE]``.

        Closing the iterator closes the connection, which is how both servers are told to stop.

        Raises:
            EngineError: as of `post`, or the connection broke before the end.
        """
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise self._refused(path, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    yield json.loads(data)
        except (httpx.HTTPError, ValueError) as error:
            raise self._lost(path, error) from error
        raise EngineError(f"{self.where}{path} ended its answer early; the server may have died")

    async def _request(
        self, method: str, path: str, body: object, query: Mapping[str, str] | None
    ) -> httpx.Response:
        try:
            response = await self._client.request(method, path, json=body, params=query)
        except httpx.HTTPError as error:
            raise self._lost(path, error) from error
        if response.status_code >= 400:
            raise self._refused(path, response)
        return response

    def _decoded(self, path: str, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise EngineError(
                f"{self.where}{path} answered something that is not JSON: "
                f"{response.text[:_SHOWN_CHARS]!r}. Is this the server that the recipe names?"
            ) from error

    def _refused(self, path: str, response: httpx.Response) -> EngineError:
        return EngineError(
            f"{self.where}{path} answered {response.status_code}: {response.text[:_SHOWN_CHARS]}"
        )

    def _lost(self, path: str, error: Exception) -> EngineError:
        return EngineError(
            f"{self.where}{path} does not answer ({type(error).__name__}: {error}); see the server's log"
        )


def prometheus(text: str, fields: Mapping[str, str]) -> dict[str, int]:
    """Return the counters of a Prometheus page by the names that ``fields`` gives them, summed over labels."""
    counts: dict[str, int] = {}
    for match in _METRIC.finditer(text):
        field = fields.get(match["name"])
        if field is not None:
            counts[field] = counts.get(field, 0) + int(float(match["value"]))
    return counts
