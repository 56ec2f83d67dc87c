"""``ullage web``: the page on this machine, or for others."""

import argparse
import socket
import sys
import webbrowser

from ullage.cli.arguments import positive_int

_PORT = 8321


DESCRIPTION = """\
Serve a page on which a model and a machine are chosen, and which answers whether it fits, how fast it
trains, what that costs, why, and how far it is from the best possible. The page needs no network. Without
--public, only this machine reaches it."""
EXAMPLES = """
    ullage web --open
    ullage web --public plans.example.org --port 80
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--port", type=positive_int, default=_PORT, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--public",
        metavar="HOST",
        help="serve others too, who reach the page under this host name. Models that are only on this machine's disk, "
        "and this machine's own profile, are then unknown",
    )
    parser.add_argument(
        "--proxies",
        type=positive_int,
        default=0,
        metavar="N",
        help="servers in front of a public page that write X-Forwarded-For; visitors are told apart by it",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    """Serve until the end."""
    from ullage.web.app import LOCAL, Site, make_app  # noqa: PLC0415 - it may be missing, and the planner is slow to import

    import uvicorn  # noqa: PLC0415 # isort: skip

    if args.port > 65535:
        raise ValueError(f"--port {args.port} is no port; give a number of at most 65535")
    if args.proxies and not args.public:
        raise ValueError(f"--proxies {args.proxies} is for a page that others reach; give --public HOST too")
    site = Site(LOCAL | {args.public.lower()}, public=True, proxies=args.proxies) if args.public else Site()
    try:
        opened = socket.create_server(("0.0.0.0" if args.public else "127.0.0.1", args.port))  # noqa: S104 - asked for
    except OSError as error:
        raise ValueError(f"--port {args.port}: {error.strerror}; give another one") from error
    address = f"http://{args.public or 'localhost'}:{args.port}/"
    sys.stderr.write(f"ullage web: the page is at {address} (Ctrl-C ends it)\n")
    if args.open and not webbrowser.open(address):
        sys.stderr.write(f"ullage web: no browser was found; open {address} yourself\n")
    config = uvicorn.Config(
        make_app(site), log_level="warning", server_header=False, proxy_headers=False, timeout_graceful_shutdown=2
    )
    with opened:
        uvicorn.Server(config).run(sockets=[opened])
    return 0
