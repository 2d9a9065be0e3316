"""A real headless Chromium for tests, spoken to through its debugging pipe: no driver, no socket, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One tab. `events` holds what the browser reported since the last `open`."""

    def __init__(self, program: str, profile: Path):
        ours, theirs = os.pipe(), os.pipe()  # we write to ours[1], they write to theirs[1]

        def connect() -> None:
            os.dup2(ours[0], 10)  # first out of the way of 3 and 4, where Chromium looks for its pipe
            os.dup2(theirs[1], 11)
            os.dup2(10, 3)
            os.dup2(11, 4)

        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [program, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", *sandbox, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=connect,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.back = ours[1], theirs[0]
        self.buffer, self.number, self.session = b"", 0, None
        self.events: list[dict] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{part}.enable")

    def call(self, method: str, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        return self.wait(lambda answer: answer.get("id") == self.number)

    def wait(self, is_it, seconds: float = 30.0):
        """The first message that fits; events on the way are kept."""
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self.buffer:
                line, _, self.buffer = self.buffer.partition(b"\0")
                message = json.loads(line)
                if "method" in message:
                    self.events.append(message)
                if is_it(message):
                    if "error" in message:
                        raise RuntimeError(message["error"])
                    return message.get("result", message)
            if not select.select([self.back], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium did not answer")
            self.buffer += os.read(self.back, 1 << 20)

    def open(self, file: Path, *, width: int, dark: bool = False, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.wait(lambda message: message.get("method") == "Page.loadEventFired")

    def run(self, script: str):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self) -> list[str]:
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def move_mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press_tab(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def printed(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        os.close(self.to)
        os.close(self.back)
