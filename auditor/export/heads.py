"""HEAD is answered like GET: FastAPI's routes know GET only, and the server leaves out the body by itself."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """Shows the application a GET. The server keeps its own scope, by which it knows that no body may follow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
