"""Pages of runs in a real browser: nothing is fetched, nothing complains, nothing is wider than a phone."""

import contextlib
import os
import shutil

import pytest
from run_files import write_run

from experiments import report

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    missing = "Chromium is not on the PATH" if path is None else None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is not installed: pip install -e '.[browser]'"
    if missing:
        (pytest.fail if os.environ.get("CNNJAX_STRICT") == "1" else pytest.skip)(missing)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run, and three side by side with names of every kind."""
    folder = tmp_path_factory.mktemp("runs")
    one = write_run(folder / "one", steps=2000, names=[f"a rather long class name {i}" for i in range(10)])
    name = "<script>alert(1)<> 'q' \"ü\" 猫 " + "a_very_long_name_without_any_space_" * 3
    many = [one, write_run(folder / name, names=["</script>", "<img src=x>", "$x$"], mistakes=2, seed=1, lr=0.1),
            write_run(folder / "regression", regression=True, channels=1, mistakes=2, seed=2)]  # fmt: skip
    assert report.main([str(one)]) == 0
    assert report.main([*map(str, many), "--out", str(folder / "out")]) == 0
    return {"one": one / "report.html", "many": folder / "out" / "report.html"}


@pytest.mark.parametrize("which", ["one", "many"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_in_chromium(browser, pages, which, scheme):
    with contextlib.closing(browser.new_page(color_scheme=scheme, viewport={"width": 360, "height": 740})) as page:
        said, fetched = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(pages[which].as_uri())
        for details in page.locator("summary").all():
            details.click()
        assert said == []
        assert [url for url in fetched if not url.startswith("data:")] == [pages[which].as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

        titles = page.locator("h2").all_inner_texts()
        assert titles == ["Summary", "Diagnosis", "Curves", "Evaluation", "Worst mistakes",
                          "Filters of the first layer", "Options", "Environment", "Reproduce"]  # fmt: skip
        runs = 1 if which == "one" else 3
        curves = [f"{name}-{kind}-{run}" for run in range(runs) for name in ("loss",) for kind in ("train", "val")]
        curves += [f"{name}-train-{run}" for run in range(runs)
                   for name in ("loss_by_step", "learning_rate", "throughput")]  # fmt: skip
        for name in curves:
            box = page.locator(f"[id='{name}'] path").first.bounding_box()
            assert box["width"] > 20 and box["x"] >= 0 and box["x"] + box["width"] <= 360, name
        broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
        assert page.evaluate(broken) == 0

        # Text is light on dark or dark on light, in plots too.
        shades = page.evaluate("""() => [["body", "backgroundColor"], ["p", "color"], ["svg text", "fill"]].map(
            ([selector, of]) => getComputedStyle(document.querySelector(selector))[of].match(/[0-9.]+/g).map(Number)
        ).map(([red, green, blue]) => (red + green + blue) / 3)""")
        shade = dict(zip(("page", "text", "plot"), shades, strict=True))
        assert abs(shade["page"] - shade["text"]) > 150 and abs(shade["page"] - shade["plot"]) > 150
        assert (shade["page"] < 100) == (scheme == "dark")
