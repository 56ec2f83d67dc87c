"""The page as an ASGI application: ``uvicorn ullage.web.app:app`` behind a server, ``ullage web`` on this machine.

Environment: ``ULLAGE_WEB_HOSTS`` names the hosts under which visitors reach the page, divided by commas. Without it the
page answers to this machine alone. ``ULLAGE_WEB_PROXIES`` is how many servers of yours stand in front: the address of a
visitor is then what the outermost of them wrote into ``X-Forwarded-For``. ``SPACE_HOST`` is what Hugging Face's Spaces
set; they show the page in a frame, behind one server.
"""

import ast
import asyncio
import base64
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import ipaddress
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping
from importlib.resources import files
from typing import Any, Final

import ullage
from ullage.web.jobs import Jobs
from ullage.web.question import AXES, MOST_BYTES, machines, question_of
from ullage.web.worker import KINDS

try:
    from plotly.offline import get_plotlyjs
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the page needs more packages; pip install 'ullage[web]'", name=error.name) from error

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

LOCAL: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


@dataclasses.dataclass(frozen=True)
class Site:
    """Where the page stands.

    Attributes:
        hosts: host names under which it is reached; others are refused, because a name that someone else owns could
            point here (DNS rebinding).
        public: whether others than this machine's user reach it.
        proxies: servers in front of it that write ``X-Forwarded-For``. Without any, that header could be anybody's.
        frames: an origin that may show it in a frame; empty: none.
    """

    hosts: frozenset[str] = LOCAL
    public: bool = False
    proxies: int = 0
    frames: str = ""

    @classmethod
    def of_environment(cls) -> "Site":
        """Return what the environment says; see the module."""
        named = os.environ.get("ULLAGE_WEB_HOSTS", "")
        space = os.environ.get("SPACE_HOST", "")
        hosts = frozenset(name.strip().lower() for name in (*named.split(","), space) if name.strip())
        if not hosts:
            return cls()
        proxies = int(os.environ.get("ULLAGE_WEB_PROXIES") or bool(space))
        return cls(hosts | LOCAL, public=True, proxies=proxies, frames="https://huggingface.co" if space else "")

    def visitor(self, request: "Request") -> str:
        """Return who asks: an address, of IPv6 the network of 64 bits; empty if there is only this machine's user."""
        if not self.public:
            return ""
        address = request.client.host if request.client else ""
        hops = [hop.strip() for text in request.headers.getlist("x-forwarded-for") for hop in text.split(",")]
        if self.proxies and len(hops) >= self.proxies:
            address = hops[-self.proxies]
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return "unknown"
        return str(ipaddress.ip_network((found, 64), strict=False) if found.version == 6 else found)


def guarded(app: Any, site: Site) -> Any:
    """Return an application that refuses requests of other sites and hosts, and sets headers of security.

    They are those that OWASP's cheat sheet of headers lists.
    """
    frames = site.frames or "'none'"
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'self' {_styles()}; img-src 'self' data: blob:; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
    )
    own = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        **({} if site.frames else {"x-frame-options": "DENY"}),
    }
    own_headers = [(name.encode(), value.encode()) for name, value in own.items()]

    async def handle(scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def with_headers(message: _Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *own_headers]
            await send(message)

        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        await (_refusal(headers, site.hosts) or app)(scope, receive, with_headers)

    return handle


def _refusal(headers: Mapping[str, str], hosts: Collection[str]) -> Response | None:
    host = headers.get("host", "").lower()
    if _name_of(host) not in hosts:
        return _refused(f"this page is not called {host[:100]!r}", 421)
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != host:
        return _refused("another site may not ask this page", 403)
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") not in {None, "navigate"}:
        return _refused("another site may not ask this page", 403)
    return None


@functools.cache
def _styles() -> str:
    """Return the digests of the styles that plotly.js makes: an empty one, which it adds rules to, and whole texts."""
    texts = ["", *(ast.literal_eval(text) for text in re.findall(r"\.textContent=('(?:[^'\\]|\\.)*')", get_plotlyjs()))]
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _name_of(host: str) -> str:
    """Return a host without its port."""
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() and name else host


def _refused(words: str, status: int) -> JSONResponse:
    return JSONResponse({"error": words}, status, {"retry-after": "60"} if status == 503 else None)


@functools.cache
def _assets() -> Mapping[str, tuple[bytes, bytes]]:
    """Return the files of the page by their names, plain and compressed; nothing else can be asked for."""
    own, shared = files("ullage.web") / "assets", ullage.page_assets()
    texts = {name: (own / name).read_text(encoding="utf-8") for name in ("index.html", "web.css", "web.js")}
    texts |= {"report.css": shared["page.css"], "charts.js": shared["page.js"], "plotly.js": get_plotlyjs()}
    return {name: (text.encode(), gzip.compress(text.encode(), 6)) for name, text in texts.items()}


def _asset(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    if name not in _assets():
        return _refused("there is no such page", 404)
    age = "max-age=3600" if name == "plotly.js" else "no-cache"
    plain, small = _assets()[name]
    headers = {"cache-control": age, "vary": "accept-encoding"}
    if is_small := "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    return Response(small if is_small else plain, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


@functools.cache
def _choices(*, public: bool) -> bytes:
    """Return what the page offers, as JSON."""
    offered = {}
    for name in machines(public=public):
        profile = ullage.load_profile(name)
        offered[name] = {
            "words": profile.description,
            "devices": profile.devices_per_node,
            "nodes": profile.inter_node is not None,
            "nvme": profile.nvme is not None,
            "memory_bytes": profile.device.memory_bytes.value,
        }
    return json.dumps(
        {
            "models": ullage.list_models(),
            "machines": offered,
            "optimizers": list(ullage.Request.__dataclass_fields__["optimizer"].metadata["choices"]),
            "axes": {name: values.split(",") for name, values in AXES.items()},
            "themes": ullage.page_assets()["themes"],
            "public": public,
            "most_bytes": MOST_BYTES,
        }
    ).encode()


async def _body(request: Request) -> bytes:
    """Return the body of a request, as soon as it is known to be small enough.

    Raises:
        ValueError: it is too long.
    """
    found = b""
    async for chunk in request.stream():
        found += chunk
        if len(found) > MOST_BYTES:
            raise ValueError(f"the question is longer than {MOST_BYTES:,} B with its files; give smaller ones")
    return found


async def _lines(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Yield lines as they come. If the visitor leaves, what makes them ends at once, also while it says nothing."""
    async with contextlib.aclosing(rest):
        yield first + b"\n"
        async for line in rest:
            yield line + b"\n"


def make_app(site: Site, jobs: Jobs | None = None) -> Starlette:
    """Return the application.

    Args:
        site: where the page stands.
        jobs: what answers questions.
    """
    jobs = jobs or Jobs()

    @contextlib.asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        jobs.warm()
        try:
            yield
        finally:
            await jobs.close()

    async def choices(_request: Request) -> Response:
        return Response(_choices(public=site.public), media_type="application/json")

    async def ask(request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in KINDS:
            return _refused("there is no such question", 404)
        if request.headers.get("content-type") != "application/json":
            return _refused("a question is JSON; send what the page sends", 415)
        try:
            asked = question_of(await _body(request), public=site.public)
            lines = jobs.lines(kind, asked, site.visitor(request))
            first = await anext(lines)
        except ValueError as error:
            return _refused(str(error), 400)
        except asyncio.QueueFull as error:
            return _refused(str(error), 503)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(_lines(first, lines), media_type="application/x-ndjson", headers=headers)

    return Starlette(
        routes=[
            Route("/", _asset),
            Route("/assets/{name}", _asset),
            Route("/api/choices", choices),
            Route("/api/{kind}", ask, methods=["POST"]),
        ],
        middleware=[Middleware(guarded, site)],
        lifespan=life,
    )


def __getattr__(name: str) -> Any:
    """Make ``app`` for a server that asks for it."""
    if name == "app":
        return make_app(Site.of_environment())
    raise AttributeError(name)
