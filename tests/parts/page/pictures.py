"""The page's pictures in docs/images, of a recording: `python -m tests.parts.page.pictures trace.jsonl docs/images`.

Needs Chromium. The recording of those that are there: `vllm-rollout serve smollm2-135m-instruct --rollout-emulate
examples/emulate_7b.json --data-parallel-size 2 --rollout-record trace.jsonl`, rollouts of 64 prompts, 8 of 16
candidates, 1,024 tokens, with rewards and a `detection_length` of 128; of the file the last rollout, which prunes, and
its rewards.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fastapi import FastAPI

from tests.kernel.http.conftest import serving
from vllm_rollout.parts.page.http.page import page_router
from vllm_rollout.parts.page.watching.recorded_feed import RecordedFeed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VIEWS = {"now": "groups complete", "step": "where tokens went"}
"""A view, and what stands there when it is drawn."""


def draw(trace: Path, folder: Path) -> None:
    """Draw `watch_now.png` and `watch_step.png`."""
    from playwright.sync_api import sync_playwright

    app = FastAPI()
    app.include_router(RecordedFeed(trace).router())
    app.include_router(page_router())
    with serving(app) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for view, words in VIEWS.items():
            page = browser.new_page(viewport={"width": 1400, "height": 700})
            page.goto(f"{url}/rollouts#{view}")
            page.wait_for_function("(words) => document.body.innerText.includes(words)", arg=words)
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"watch_{view}.png", full_page=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
