"""`vitfocus serve`: a local page that shows where one or two models look in an image."""

from __future__ import annotations

import argparse
import importlib.util
import json
import secrets
import socket
import webbrowser
from pathlib import Path

from vitfocus.cli.common import add_device, add_weights, label_models, open_named_model, positive, say, whole
from vitfocus.core.errors import VitfocusError

_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", nargs="+", metavar="MODEL", help="one or two models, as for vitfocus diagnose")
    add_weights(parser)
    parser.add_argument("--treat", metavar="SPEC", help="show MODEL beside itself with these treatments inserted")
    parser.add_argument("--images", metavar="DIR", help="folder of pictures to start with (default: built-in Shapes)")
    parser.add_argument("--limit", type=positive, default=8, metavar="N", help="use at most N of them (default: 8)")
    parser.add_argument(
        "--against", default="gaussian_noise/3", metavar="NAME/SEVERITY", help="corruption to start with"
    )
    parser.add_argument("--port", type=whole, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="print the address without opening it")
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    """Load the models, print the address, and answer requests until interrupted."""
    from vitfocus.cli.diagnose import image_files

    if len(args.model) > 2:
        raise VitfocusError(f"vitfocus serve shows one or two models, not {len(args.model)}.")
    if args.treat and len(args.model) > 1:
        raise VitfocusError("--treat shows one model with and without treatments: give one MODEL.")
    if not 0 <= args.port < 65536:
        raise VitfocusError(f"--port is {args.port}; expected 1 to 65535, or 0 for a free one.")
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise VitfocusError("vitfocus serve needs starlette and uvicorn: pip install 'vitfocus[serve]'.")
    shown = [(label, name, file, None) for label, (name, file) in label_models(args).items()]
    if args.treat:
        shown += [(label, name, file, args.treat) for label, (name, file) in label_models(args, args.treat).items()]
    files = image_files(Path(args.images), args.limit) if args.images else []  # before any slow import
    bound = _bind(args.port)

    import uvicorn

    from vitfocus.core.environment import usable_device
    from vitfocus.data.image_files import open_image
    from vitfocus.report.serve import PIXELS, create_app

    device = usable_device(args.device)
    models = {
        label: open_named_model(name, file, treat, pretrained=args.pretrained).to(device)
        for label, name, file, treat in shown
    }
    token = secrets.token_urlsafe(16)
    pictures = {file.name: open_image(file, PIXELS) for file in files}
    app = create_app(models, pictures, against=args.against, token=token)
    address = f"http://{_HOST}:{bound.getsockname()[1]}/?token={token}"
    print(json.dumps({"url": address}) if args.json else f"{address}\nStop with Ctrl-C.", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off", limit_concurrency=64
    )
    try:
        uvicorn.Server(settings).run(sockets=[bound])
    except KeyboardInterrupt:
        say("Stopped.")
    return 0


def _bind(port: int) -> socket.socket:
    """Bind the port, before any slow work."""
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((_HOST, port))
        place.listen()  # a browser that is opened early then waits
    except OSError as error:
        place.close()
        raise VitfocusError(f"Port {port} of {_HOST} cannot be used: {error.strerror}; try another --port.") from None
    return place
