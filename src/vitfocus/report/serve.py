"""The live page: the explorer for any image, computed by models in memory.

`create_app` returns a Starlette application. `vitfocus serve` binds it to 127.0.0.1. Its address contains a token,
requests must name this host (otherwise another page could reach it by DNS rebinding), and no other origin is allowed.
Requests contain their whole state, so any number of tabs can be open.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitfocus.attention.batches import prepared
from vitfocus.attention.capture import Models, named_models
from vitfocus.core.arguments import checked
from vitfocus.core.errors import VitfocusError
from vitfocus.core.modules import inserted, insertion_sentence
from vitfocus.corruptions import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt, parse
from vitfocus.data.image_files import open_image, to_image
from vitfocus.report.explorer_maps import LEVELS, ObservedImage, Reader, View, data_url, headings
from vitfocus.report.page import Page

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

#: The largest image that is accepted: bytes of its file, and pixels.
BYTES, PIXELS = 20_000_000, 40_000_000
#: The number of images that are kept, and of forward passes per model.
_PICTURES, _FORWARD_PASSES = 64, 32
#: Maps with more entries are made coarser.
_ENTRIES = 1_200_000
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Live:
    """Models in memory, uploaded images, and the latest forward passes. Calls must not overlap."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.readers = [Reader(name, model) for name, model in models.items()]
        self._pictures: OrderedDict[str, tuple[str, list[Tensor]]] = OrderedDict()
        self._observed: OrderedDict[tuple[str, str, int], tuple[Tensor, ObservedImage]] = OrderedDict()
        self._secret = secrets.token_bytes(16)

    def add(self, picture: Image.Image) -> str:
        """Store an image, preprocessed for every model, and return its id."""
        pixels = [prepared([picture], reader.body)[0] for reader in self.readers]
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in pixels)).hexdigest()[:32]
        name = hmac.new(self._secret, digest.encode(), "sha256").hexdigest()[:32]  # cannot be guessed
        _remember(self._pictures, name, (digest, pixels), _PICTURES)
        return name

    def described(self, picture: str, name: str) -> dict[str, Any]:
        """A picture as the page lists it: its id, its name and a small copy of it."""
        return {"id": picture, "name": name, "views": [data_url(self._picture(picture)[1][0], 96)]}

    def look(self, picture: str, against: str) -> list[dict[str, Any]]:
        """For each model, the picture as it sees it and the likeliest classes, clean and, unless empty, corrupted."""
        found = [self._views(picture, against, model) for model in range(len(self.readers))]
        return [
            {"views": [data_url(pixels) for pixels, _ in views], "best": [one.prediction for _, one in views]}
            for views in found
        ]

    def maps(self, picture: str, against: str, model: int, layer: int) -> list[View]:
        """The maps and readings of one layer, clean and corrupted."""
        if not 0 <= model < len(self.readers) or not 0 <= layer < len(self.readers[model].blocks):
            raise VitfocusError(f"There is no layer {layer} of model {model}.")
        reader = self.readers[model]
        observed = [one for _, one in self._views(picture, against, model)]
        return reader.pack(reader.blocks[layer], observed, _ENTRIES, effort=1)

    def _picture(self, name: str) -> tuple[str, list[Tensor]]:
        if name not in self._pictures:
            raise VitfocusError("This image is no longer stored: upload it again.")
        self._pictures.move_to_end(name)
        return self._pictures[name]

    def _views(self, picture: str, against: str, model: int) -> list[tuple[Tensor, ObservedImage]]:
        digest, pixels = self._picture(picture)
        views = [self._seen(picture, "", model, lambda: pixels[model])]
        if against:
            name, severity = parse(against)
            views.append(
                self._seen(picture, against, model, lambda: corrupt(pixels[model], name, severity, ids=[digest]))
            )
        return views

    def _seen(self, picture: str, against: str, model: int, make: Callable[[], Tensor]) -> tuple[Tensor, ObservedImage]:
        key = (picture, against, model)
        if key not in self._observed:
            image = make()
            found = image, self.readers[model].observe(image)
            _remember(self._observed, key, found, _FORWARD_PASSES * len(self.readers))
        self._observed.move_to_end(key)
        return self._observed[key]


def _remember(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


@checked
def create_app(
    models: Models,
    pictures: Mapping[str, Image.Image] | None = None,
    *,
    against: str = "gaussian_noise/3",
    token: str | None = None,
    hosts: Sequence[str] = ("127.0.0.1", "localhost"),
    title: str | None = None,
) -> Starlette:
    """The live page as an ASGI application, for `vitfocus serve`, a Space or any ASGI server.

    Args:
        models: One model, or one or two models by name, shown side by side.
        pictures: Pictures to start with, by name. Default: three of the built-in data set Shapes.
        against: Corruption to start with.
        token: The value of `?token=` that the page's address must have; None for public access.
        hosts: The host names under which the page may be requested; "*" for any.
        title: Title of the page.

    Returns:
        The application.

    Raises:
        VitfocusError: If starlette is not installed, or a model has no layer that attends to the whole image.

    Example:
        >>> import timm
        >>> app = create_app(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64), hosts=["*"])
        >>> sorted(route.path for route in app.routes)
        ['/', '/look', '/maps', '/pictures']
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route
    except ImportError:
        raise VitfocusError(NEEDED) from None
    named = named_models(models)
    parse(against)
    live = Live(named)
    starting = dict(pictures) if pictures else _shapes(live)
    first = [live.described(live.add(picture), name) for name, picture in starting.items()]
    live.look(first[0]["id"], "")  # the layers are known after this
    handlers = _Handlers(live, token, first, against, title or " and ".join(named))
    return Starlette(
        routes=[
            Route("/", handlers.page),
            Route("/pictures", handlers.pictures, methods=["POST"]),
            Route("/look", handlers.look),
            Route("/maps", handlers.maps),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers={VitfocusError: handlers.refuse},
    )


NEEDED = "The live page needs starlette and uvicorn, which are not installed: pip install 'vitfocus[serve]'."


class _Handlers:
    """The request handlers."""

    def __init__(self, live: Live, token: str | None, pictures: list[Any], against: str, title: str) -> None:
        self.live, self.token = live, token
        self.queue = asyncio.Lock()  # one request computes at a time; cancelled ones are dropped
        page = Page(title, "Runs on this machine: pictures are not sent anywhere else." if token else "")
        name, severity = parse(against)
        notes = [note for reader in live.readers for note in reader.notes()]
        for reader in live.readers:
            notes += [insertion_sentence("+".join(late), reader.name)] if (late := inserted(reader.model)) else []
        page.data = {
            "live": {
                "token": token,
                "corruptions": [*CORRUPTIONS, *EXTRA_CORRUPTIONS],
                "corruption": name,
                "severity": severity,
                "bytes": BYTES,
            },
            "images": pictures,
            "levels": LEVELS,
            "headings": headings(),
            "models": [
                {"name": reader.name, "blocks": len(reader.body), "layers": reader.layers(_ENTRIES)}
                for reader in live.readers
            ],
            "notes": notes,
        }
        self.html = page.html()

    def _require_token(self, given: str | None) -> None:
        if self.token is not None and not secrets.compare_digest((given or "").encode(), self.token.encode()):
            from starlette.exceptions import HTTPException

            raise HTTPException(403, "Open the address that vitfocus serve printed: it carries a token.")

    async def page(self, request: Request) -> Response:
        """The page itself."""
        from starlette.responses import HTMLResponse

        self._require_token(request.query_params.get("token"))
        frames = {"X-Frame-Options": "DENY"} if self.token is not None else {}
        return HTMLResponse(self.html, headers=_HEADERS | frames)

    async def pictures(self, request: Request) -> Response:
        """Upload an image, the body of the request."""
        self._require_token(request.headers.get("x-token"))
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > BYTES:
                raise VitfocusError(f"The image has more than {BYTES / 1e6:g} MB.")
        name = request.query_params.get("name", "picture")[:100]

        def add() -> dict[str, Any]:
            return self.live.described(self.live.add(open_image(io.BytesIO(content), PIXELS)), name)

        return await self._answer(request, add)

    async def look(self, request: Request) -> Response:
        """The image as each model sees it, and the predictions."""
        picture, against = self._asked(request)
        return await self._answer(
            request,
            lambda: {"models": self.live.look(picture, against), "image": self.live.described(picture, "picture")},
        )

    async def maps(self, request: Request) -> Response:
        """The maps and readings of one layer."""
        picture, against = self._asked(request)
        try:
            model, layer = (int(request.query_params.get(name, "")) for name in ("model", "layer"))
        except ValueError:
            raise VitfocusError("model and layer are numbers.") from None
        return await self._answer(request, lambda: self.live.maps(picture, against, model, layer))

    def _asked(self, request: Request) -> tuple[str, str]:
        """The image and the corruption of a request."""
        self._require_token(request.headers.get("x-token"))
        return request.query_params.get("picture", ""), request.query_params.get("against", "")

    async def _answer(self, request: Request, compute: Callable[[], Any]) -> Response:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import JSONResponse, Response

        async with self.queue:
            if await request.is_disconnected():
                return Response(status_code=499)
            return JSONResponse(await run_in_threadpool(compute), headers=_HEADERS)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return an error as one sentence."""
        from starlette.responses import JSONResponse

        return JSONResponse({"error": str(error)}, 400, headers=_HEADERS)


def _shapes(live: Live) -> dict[str, Image.Image]:
    from vitfocus.data.shapes.dataset import shapes_batch

    images = shapes_batch(range(3), split="val", size=live.readers[0].body.build_size)[0]
    return {f"Shapes {index}": to_image(one) for index, one in enumerate(images.to(torch.uint8))}
