"""The latency of the live page: `vitfocus serve` with DeiT-Ti, from an event in Chromium to the drawn picture.

Targets on two CPU cores: 150 ms for a change of token, layer or head, 1 s for a new picture or severity. Writes
`results/live-page-cpu.json`: median and 90th percentile in milliseconds, including all work of the browser.

    python benchmarks/live_page.py --weights deit_tiny_patch16_224.safetensors --images DIR [--note "what else ran"]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
#: Milliseconds from an action to the first frame that shows its result.
TIMED = """([kind, value]) => new Promise((resolve) => {
  const stage = document.getElementById("stage"), start = performance.now();
  const watch = new MutationObserver(() => {
    if (stage.getAttribute("aria-busy") !== "false") return;
    watch.disconnect();
    requestAnimationFrame(() => resolve(performance.now() - start));
  });
  watch.observe(stage, { attributes: true, attributeFilter: ["aria-busy"] });
  if (kind === "picture") {
    const bytes = Uint8Array.from(atob(value), (c) => c.charCodeAt(0)), given = new DataTransfer();
    given.items.add(new File([bytes], `picture ${start}.jpg`, { type: "image/jpeg" }));
    const input = document.getElementById("file");
    input.files = given.files;
    input.dispatchEvent(new Event("change"));
  } else if (kind === "token") {
    stage.dispatchEvent(new KeyboardEvent("keydown", { key: value }));
  } else {
    const input = document.querySelector(`[data-control="${kind}"]`);
    input.value = value;
    input.dispatchEvent(new Event("input"));
  }
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--images", required=True, type=Path, help="a folder of photographs")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "live-page-cpu.json")
    args = parser.parse_args()
    photographs = sorted(args.images.rglob("*.jpg")) or sorted(args.images.rglob("*.JPEG"))
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "vitfocus", "serve", "deit_tiny_patch16_224", "--weights", str(args.weights)]
    server = subprocess.Popen(
        [*command, "--no-browser", "--device", "cpu", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(address)
            page.locator('#stage[aria-busy="false"]').wait_for()
            actions = {
                "picture": [base64.b64encode(one.read_bytes()).decode() for one in photographs[: args.turns + 1]],
                "severity": [str(turn % 5 + 1) for turn in range(5)],
                "step": [str(turn % 12) for turn in range(12)],
                "head": [str(turn % 4 - 1) for turn in range(args.turns + 1)],
                "token": ["ArrowUp", "ArrowLeft"] * (args.turns // 2 + 1),
            }
            times = {kind: [page.evaluate(TIMED, [kind, one]) for one in given] for kind, given in actions.items()}
            browser.close()
    finally:
        server.kill()
    result = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                     "load": [round(one, 1) for one in os.getloadavg()]},
        "note": args.note,
        "milliseconds": {kind: summary(found[1:]) for kind, found in times.items()},  # the first warms up
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def summary(times: list[float]) -> dict[str, int]:
    return {"median": round(median(times)), "p90": round(quantiles(times, n=10)[-1]), "turns": len(times)}


if __name__ == "__main__":
    main()
