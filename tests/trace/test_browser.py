"""The page in a browser: steps, keys, themes, and numbers that are those of the definition.

It needs an installed Chromium (Debian's package ``chromium``) and playwright, which drives it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rowmax.trace import MASKS, page
from rowmax.trace.page import DIGITS, numbers
from rowmax.trace.record import Dense, Pass, defined, record
from rowmax.trace.setting import calls

from .settings import SETTINGS

pytest.importorskip("playwright", reason="playwright is not installed: no page is driven")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for found in map(shutil.which, NAMES) if found), None)
if CHROMIUM is None:
    pytest.skip("no Chromium is installed: no page is driven", allow_module_level=True)

from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

PASSES = ("forward", "dq", "dkdv")
RAGGED = SETTINGS["ragged"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    root = getattr(os, "geteuid", lambda: 1)() == 0
    arguments = ["--no-sandbox"] if root else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name in SETTINGS:
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(SETTINGS[name]), encoding="utf-8")
    return found


class Opened:
    """A page that is open, and everything that it complained about or requested."""

    def __init__(self, browser: Browser, file: Path, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert len(self.requests) == 1

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def choose(self, mask: str, name: str) -> None:
        self.page.select_option("#mask", mask)
        self.page.select_option("#pass", name)

    def row(self, row: int) -> None:
        self.page.select_option("#row", str(row))

    def numbers(self, name: str, kind: str = "now") -> list[str]:
        return self.page.locator(f"#state tr[data-{kind}={name}] td").all_inner_texts()

    def theme(self) -> str:
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")

    @property
    def step(self) -> int:
        return int(self.text("#status").split()[1])


@pytest.fixture
def opened(browser: Browser, files: dict[str, Path]) -> Iterator[Opened]:
    shown = Opened(browser, files["ragged"])
    yield shown
    shown.close()


@pytest.fixture(scope="module")
def recorded() -> dict[str, tuple[dict[str, Pass], Dense]]:
    return {call.name: (record(call), defined(call)) for call in calls(RAGGED)}


def printed(values: list[float | None]) -> list[str]:
    """Return numbers as the page prints them."""
    return ["−∞" if x is None else f"{x:.{DIGITS}f}".replace("-", "−") for x in values]  # noqa: RUF001


LIGHT, DARK = "rgb(251, 250, 248)", "rgb(22, 21, 19)"


def test_the_results_are_those_of_the_definition(opened: Opened, recorded: dict):
    for mask in MASKS:
        _, dense = recorded[mask]
        wanted = {
            "forward": {"Ol": dense.out, "LSE": dense.lse[:, None]},
            "dq": {"dQ": dense.dq},
            "dkdv": {"dK": dense.dk, "dV": dense.dv},
        }
        for name, results in wanted.items():
            opened.choose(mask, name)
            opened.page.click("#to-end")
            for row in (0, 5, 10):
                opened.row(row)
                for result, matrix in results.items():
                    values = printed(numbers(matrix[row]))
                    assert opened.numbers(result) == values, (mask, name, row)
                    assert opened.numbers(result, "dense") == values


#: shows every step of every mask and pass for some rows; returns the texts that are wrong
EVERYTHING = """() => {
    const wrong = [];
    at("follow").checked = false;
    for (const mask of at("mask").options) {
        for (const pass of at("pass").options) {
            at("mask").value = mask.value;
            at("pass").value = pass.value;
            choose();
            for (const row of [0, Math.floor(residentCount() / 2), residentCount() - 1]) {
                chooseRow(row);
                for (let n = 0; n <= passOf().steps.length; n++) {
                    goTo(n);
                    const text = document.querySelector("main").textContent;
                    const bad = /undefined|NaN|null|Infinity/.test(text);
                    if (bad || state.row !== row) wrong.push(text);
                }
            }
        }
    }
    return wrong;
}"""


@pytest.mark.parametrize("name", SETTINGS)
def test_no_step_of_any_row_lacks_a_number(browser: Browser, files: dict[str, Path], name: str):
    opened = Opened(browser, files[name])
    assert opened.page.evaluate(EVERYTHING) == []
    opened.close()


def test_every_step_shows_the_numbers_of_the_recording(opened: Opened, recorded: dict):
    forward = recorded["window"][0]["forward"]
    opened.choose("window", "forward")
    assert "nothing is read" in opened.text("#status")
    before = None
    for n, step in enumerate(forward.steps, 1):
        opened.page.click("#forth")
        assert opened.step == n
        r = int(opened.page.input_value("#row")) - step.i * RAGGED.block_q
        values = {name: numbers(t) for name, t in step.values.items()}
        shown = opened.text("#formulas")
        if step.kind == "end":
            assert printed([values["lse"][r]])[0] in shown
            before = None
            continue
        assert opened.numbers("m") == printed([values["m"][r]])
        assert opened.numbers("l") == printed([values["l"][r]])
        assert opened.numbers("O") == printed(values["O"][r])
        if values["m"][r] is not None:
            m, l, O = (before[name][r] for name in "mlO") if before else (None, 0, [0, 0, 0])
            m, l, peak, alpha, added = printed(
                [m, l, *(values[name][r] for name in ("peak", "alpha", "added"))]
            )
            assert f"max({m}, {peak}) = {printed([values['m'][r]])[0]}" in shown
            assert f"{alpha} · {l} + {added} = {printed([values['l'][r]])[0]}" in shown
            O, P, part, new = (
                f"({', '.join(printed(x))})"
                for x in (O, values["P"][r], values["part"][r], values["O"][r])
            )
            assert P in shown
            assert f"{alpha} · {O} + {part} = {new}" in shown
        before = values
        assert f"{step.read:,} bytes of" in opened.text("#counts")


def test_steps_go_back(opened: Opened):
    seen = []
    for _ in range(4):
        seen.append((opened.text("#formulas"), opened.text("#state"), opened.text("#counts")))
        opened.page.click("#forth")
    assert len(set(seen)) == 4
    for before in reversed(seen):
        opened.page.click("#back")
        assert (opened.text("#formulas"), opened.text("#state"), opened.text("#counts")) == before
    assert opened.step == 0


def test_tiles_light_up_in_order(opened: Opened, recorded: dict):
    lit = "document.querySelectorAll('#matrix > .cell:not([fill-opacity=\"0.000\"])').length"
    for name in PASSES:
        opened.choose("documents", name)
        shown = [opened.page.evaluate(lit)]
        tiles = 0
        for step in recorded["documents"][0][name].steps:
            opened.page.click("#forth")
            shown.append(opened.page.evaluate(lit))
            grown = shown[-1] > shown[-2]
            assert grown == (step.kind == "tile")
            tiles += grown
            assert opened.page.locator("#marks .now").count() == (step.kind == "tile")
        assert tiles == sum(recorded["documents"][0][name].steps[-1].done)
        seen = sum(row.count("1") for row in _seen("documents"))
        assert shown[-1] == seen


def _seen(mask: str) -> list[str]:
    call = next(x for x in calls(RAGGED) if x.name == mask)
    return ["".join("01"[x] for x in row) for row in call.seen.tolist()]


def test_the_kinds_of_tiles_differ_without_color(opened: Opened):
    call = next(x for x in calls(RAGGED) if x.name == "window")
    opened.choose("window", "forward")
    flat = call.states.flatten().tolist()
    count = opened.page.locator
    for number, kind in enumerate(("skipped", "partial", "full")):
        assert count(f"#matrix .tile.{kind}").count() == flat.count(number)
    assert count("#matrix .cross").count() == flat.count(0)
    assert count("#matrix .hidden-pairs").count() == flat.count(1)
    dash = "s => getComputedStyle(document.querySelector(s)).strokeDasharray"
    dashes = [opened.page.evaluate(dash, f"#legend .tile.{kind}") for kind in ("partial", "full")]
    assert dashes[0] != dashes[1] == "none"


def test_the_slider(opened: Opened):
    opened.page.locator("#slider").fill("5")
    assert opened.step == 5
    opened.page.locator("#slider").focus()
    opened.page.keyboard.press("ArrowLeft")
    assert opened.step == 4
    assert opened.page.get_attribute("#slider", "aria-valuetext") == opened.text("#status")


def test_the_keyboard_alone(opened: Opened):
    press = opened.page.keyboard.press
    press("ArrowRight")
    press("ArrowRight")
    assert opened.step == 2
    press("ArrowLeft")
    assert opened.step == 1
    press("End")
    assert "are done" in opened.text("#status")
    press("Home")
    assert opened.step == 0
    opened.row(4)
    press("r")
    press("r")
    press("R")
    assert opened.page.input_value("#row") == "5"
    press("m")
    press("p")
    assert opened.page.input_value("#mask") == "window"
    assert opened.page.input_value("#pass") == "dq"
    light = opened.theme()
    press("t")
    press("t")
    assert opened.theme() != light
    opened.page.uncheck("#shortcuts")
    press("ArrowRight")
    assert opened.step == 0


def test_the_focus_is_seen_and_every_control_has_a_name(opened: Opened):
    reached = []
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    name = "document.activeElement.ariaLabel ?? document.activeElement.labels?.[0]?.innerText"
    for _ in range(30):
        opened.page.keyboard.press("Tab")
        where = opened.page.evaluate("document.activeElement.id")
        if where in reached:
            break
        if where:
            reached.append(where)
            assert opened.page.evaluate(outline) == "solid", where
            named = opened.page.evaluate(name) or opened.text(f"#{where}")
            assert named.strip(), where
    controls = opened.page.locator("button, select, input").evaluate_all(
        "all => all.map(x => x.id)"
    )
    assert set(controls) <= set(reached)


def test_it_plays_to_the_end_and_pauses(opened: Opened):
    opened.page.clock.install(time=0)
    opened.page.clock.pause_at(10_000)  # from here on only run_for moves it
    opened.choose("causal", "forward")
    opened.page.select_option("#speed", "5")
    opened.page.locator("h1").click()
    opened.page.keyboard.press("Space")
    assert opened.text("#play") == "Pause"
    assert opened.page.get_attribute("#status", "aria-live") == "off"
    assert opened.step == 1
    opened.page.clock.run_for(400)
    assert opened.step == 3
    opened.page.keyboard.press("Space")
    opened.page.clock.run_for(1000)
    assert (opened.step, opened.text("#play")) == (3, "Play")
    opened.page.click("#play")
    opened.page.clock.run_for(60_000)
    last = int(opened.page.get_attribute("#slider", "max") or 0)
    assert (opened.step, opened.text("#play")) == (last, "Play")


def test_a_click_in_the_picture_chooses_a_row(opened: Opened):
    box = opened.page.locator("#matrix .cell").nth(3 * 17 + 8).bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    opened.page.mouse.click(*middle)
    assert opened.page.input_value("#row") == "3"
    opened.page.select_option("#pass", "dkdv")
    opened.page.mouse.click(*middle)
    assert opened.page.input_value("#row") == "8"


def test_a_chosen_row_is_kept_where_tiles_are_not_followed(opened: Opened):
    opened.choose("none", "forward")
    opened.page.click("#forth")
    opened.row(9)
    assert not opened.page.is_checked("#follow")
    opened.page.click("#forth")
    assert opened.page.input_value("#row") == "9"
    assert "Nothing changes for row 9" in opened.text("#formulas")
    opened.page.check("#follow")
    assert opened.page.input_value("#row") == "1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes(browser: Browser, files: dict[str, Path], scheme: Any):
    opened = Opened(browser, files["default"], color_scheme=scheme)
    own, other = (LIGHT, DARK) if scheme == "light" else (DARK, LIGHT)
    assert opened.theme() == own
    opened.page.click("#theme")
    assert (opened.text("#theme"), opened.theme()) == ("Theme: light", LIGHT)
    opened.page.click("#theme")
    assert (opened.text("#theme"), opened.theme()) == ("Theme: dark", DARK)
    opened.page.click("#theme")
    assert (opened.text("#theme"), opened.theme()) == ("Theme: system", own)
    opened.page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    assert opened.theme() == other
    opened.close()


@pytest.mark.parametrize("name", ["default", "more queries"])
def test_a_phone(browser: Browser, files: dict[str, Path], name: str):
    opened = Opened(browser, files[name], viewport={"width": 390, "height": 844})
    sizes = """() => [...document.querySelectorAll("body *")]
        .filter((x) => [...x.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
        .filter((x) => !["SCRIPT", "STYLE", "NOSCRIPT"].includes(x.tagName))
        .map((x) => parseFloat(getComputedStyle(x).fontSize))"""
    for mask, one in (("causal", "forward"), ("window", "dkdv"), ("prefix", "dq")):
        opened.choose(mask, one)
        opened.page.locator("#slider").fill("6")
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
        found = opened.page.evaluate(sizes)
        assert len(found) > 40
        assert min(found) >= 12
    opened.close()
