"""The report in a real browser, without a network: nothing sticks out of a phone's screen, something is drawn, tables sort."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from figures.report import write_report

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)
ASK = """<script>
const values = h => [...h.closest("table").tBodies[0].rows].map(r => r.cells[h.cellIndex].textContent.trim());
const head = [...document.querySelectorAll("thead th")].find(h => values(h).length > 2 && new Set(values(h)).size === values(h).length);
const read = () => values(head).join("|");
head.click(); const up = read(); head.click(); const down = read();
const images = [...document.images];
document.title = JSON.stringify({inner: innerWidth, scroll: document.documentElement.scrollWidth, up, down,
  sort: head.getAttribute("aria-sort"), images: images.filter(i => !i.complete || !i.naturalWidth).length,
  alts: images.filter(i => !i.alt).length});
</script></body>"""


@pytest.fixture(scope="module")
def page(synthetic, tmp_path_factory):
    if BROWSER is None:
        pytest.skip("no chromium on PATH: the report is not looked at in a browser")
    few = {"prompts": 3, "tasks": ("maths",)}
    tables = {"depth_lens": synthetic.depth_lens(depths=4, starts=("keyed",), **few), "bench": synthetic.bench(repeats=1, **few)}
    manifest = {"command": "loopscope report", "versions": {"torch": "2"}, "hardware": {}}
    return write_report(tmp_path_factory.mktemp("page"), tables, manifest)


def browse(*arguments) -> str:
    run = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                          "--host-resolver-rules=MAP * ~NOTFOUND", *map(str, arguments)], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_the_screen_and_its_tables_sort(page, tmp_path, width):
    import html
    import json

    asked = tmp_path / "asked.html"
    # Headless windows have a least width, a frame has none.
    (tmp_path / "inner.html").write_text(page.read_text().replace("</body>", ASK.replace("document.title =", "parent.document.title =")))
    asked.write_text(f'<body style="margin:0"><iframe src="inner.html" style="border:0;width:{width}px;height:800px"></iframe></body>')
    dom = browse("--allow-file-access-from-files", "--window-size=1400,900", "--virtual-time-budget=4000", "--dump-dom", asked.as_uri())
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", dom, re.S)[1]))
    assert found["inner"] == width and found["scroll"] <= width, found
    assert found["images"] == found["alts"] == 0, found
    up, down = found["up"].split("|"), found["down"].split("|")
    assert up == down[::-1] and up != down and found["sort"] == "descending", found


def test_the_page_shows_something(page, tmp_path):
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    browse("--window-size=1280,900", f"--screenshot={shot}", page.as_uri())
    pixels = imread(shot)
    assert pixels.shape[:2] == (900, 1280) and pixels[..., :3].std() > 0.05
