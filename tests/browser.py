"""A headless Chromium, driven over its own DevTools protocol: no driver to install."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio

PATIENCE_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-port=0",
)


def found() -> str | None:
    """The browser's program, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """The browser's one connection. Everything waits at most PATIENCE_S."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        """What came between a command and its answer."""

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        number = next(self._ids)
        sent: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            sent["sessionId"] = session
        await self._socket.send_json(sent)
        with anyio.fail_after(PATIENCE_S):
            while (message := await self._socket.receive_json()).get("id") != number:
                self.events.append(message)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    @contextlib.asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A page in a profile of its own: no cookie or store of another one."""
        profile = (await self.call("Target.createBrowserContext"))["browserContextId"]
        try:
            target = await self.call(
                "Target.createTarget", url="about:blank", browserContextId=profile
            )
            attached = await self.call(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )
            opened = Tab(self, attached["sessionId"])
            for domain in ("Page", "Runtime", "Log"):
                await opened.call(f"{domain}.enable")
            yield opened
        finally:
            await self.call("Target.disposeBrowserContext", browserContextId=profile)


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    @property
    def logged(self) -> list[str]:
        """What the console said: uncaught errors and blocked resources."""
        return [
            json.dumps(event["params"])
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]

    async def open(self, url: str) -> None:
        """And waits until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression; of a promise, what comes of it."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """TimeoutError where it does not come true."""
        with anyio.fail_after(PATIENCE_S):
            while not await self.value(expression):  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def text(self) -> str:
        """What a reader sees."""
        return str(await self.value("document.body.innerText"))

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Space": 32}
        typed = {"Enter": "\r", "Space": " "}.get(key)
        common = {"key": " " if key == "Space" else key, "windowsVirtualKeyCode": codes[key]}
        extra = {} if typed is None else {"text": typed}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **extra)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        taken = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        await anyio.Path(path).write_bytes(base64.b64decode(taken["data"]))


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Browser]:
    """A browser with an empty profile, ended and cleared away afterwards."""
    program = found()
    assert program is not None, "no browser"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(program, *FLAGS, f"--user-data-dir={profile}"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": profile},
        )
        try:
            url = await _devtools(process)
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(url, max_msg_size=0) as socket,
            ):
                yield Browser(socket)
        finally:
            process.kill()
            with anyio.CancelScope(shield=True), anyio.fail_after(PATIENCE_S):
                await process.communicate()


async def _devtools(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    with anyio.fail_after(PATIENCE_S):
        while line := (await process.stderr.readline()).decode(errors="replace"):
            if "DevTools listening on " in line:
                return line.split("DevTools listening on ", 1)[1].strip()
    raise RuntimeError("the browser ended at its start")
