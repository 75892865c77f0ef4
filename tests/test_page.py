"""The page at `/` of a real server process, in a headless Chromium. `make test-page` runs it.

With PAGE_SHOTS=folder, pictures of the page are left there to be looked at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from page_driver import COMPLETIONS, Visit, chromium, serving

pytestmark = pytest.mark.slow
Open = Callable[..., Visit]
ATTACK = "<img src=x onerror=\"document.title='taken'\"> & <b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving("mock-cost") as address:
        yield address


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Open]:
    """Opens pages, and at the end of the test checks that none complained or asked another host."""
    visits: list[Visit] = []

    def open_page(address: str = address, *, width: int = 1280, height: int = 860, **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(15_000)
        made = Visit(context.new_page(), address)
        made.watch()
        made.page.goto(address)
        made.until("document.getElementById('model').textContent !== 'connecting'")
        visits.append(made)
        return made

    yield open_page
    for made in visits:
        made.check()
        made.page.context.close()


@pytest.fixture(scope="module")
def shoot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Visit, str], None]:
    folder = Path(os.environ.get("PAGE_SHOTS") or tmp_path_factory.mktemp("shots"))
    folder.mkdir(parents=True, exist_ok=True)
    return lambda visit, name: visit.page.screenshot(path=folder / f"{name}.png")


def test_an_answer_comes_in_parts_and_is_tinted(visit: Open, shoot: Callable[[Visit, str], None]) -> None:
    here = visit()
    page = here.page
    assert page.inner_text("#model") == "mock-cost" and "tokens of context" in page.inner_text("#context")
    shoot(here, "welcome")
    page.click(".example >> nth=0")
    assert page.input_value("#prompt") == page.inner_text(".example >> nth=0")
    here.make_long()
    here.send("Tell me a story.")
    first = here.wait_for_growth("")
    second = here.wait_for_growth(first)
    assert second.startswith(first)
    here.wait_for_growth("", beyond=600)
    for origin in ("kept", "replaced", "bonus"):
        assert page.locator(f".answer .{origin}").count() > 0, origin
    for name in ("rate", "acceptance", "per-round"):
        assert float(page.inner_text(f"#{name}").rstrip("%")) > 0, name
    page.click("#stop")
    page.wait_for_selector(".turn-end")
    shoot(here, "chat")
    tint = "getComputedStyle(document.querySelector('.answer .kept')).backgroundColor"
    tinted = page.evaluate(tint)
    page.click("#tint")
    assert page.evaluate(tint) != tinted


def test_an_answer_ends_with_its_figures_and_outlives_a_reload(visit: Open) -> None:
    here = visit()
    here.set(seed=3, max_tokens=12)
    answer = here.ask("Where does the road go?")
    end = here.page.inner_text(".turn-end")
    assert re.search(r"complete|token limit", end)
    assert re.search(r"tokens/s", end) and re.search(r"\d\.\d\d per round", end) and re.search(r"first after \d", end)
    here.page.fill("#prompt", "half a thought")
    here.page.reload()
    here.page.wait_for_selector(".turn-end")
    assert here.page.input_value("#prompt") == "half a thought"
    assert here.answer() == answer and here.page.inner_text(".question-text") == "Where does the road go?"
    here.ask("And then?")
    roles = [message["role"] for message in here.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"] and here.bodies[-1]["messages"][1]["content"] == answer


def test_text_is_never_markup(visit: Open) -> None:
    here = visit()
    said = {"choices": [{"delta": {"content": ATTACK}, "finish_reason": "stop"}]}
    trace = {"tokens": [{"text": ATTACK, "origin": "<i>"}], "drafted": 1, "accepted": 0, "refused": [ATTACK]}
    here.reply({**said, "speculation": trace})
    here.ask(ATTACK)
    here.page.hover(".round")
    assert here.answer() == ATTACK == here.page.inner_text(".question-text")
    assert ATTACK in here.page.inner_text("#hint")
    assert here.page.locator("main img, #hint img, main b").count() == 0 and here.page.title() != "taken"


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request(visit: Open, address: str, how: str) -> None:
    here = visit()
    here.make_long()
    here.send("Go on and on.")
    here.wait_for_growth("", beyond=40)
    if how == "button":
        here.page.click("#stop")
    else:
        here.page.keyboard.press("Escape")
    here.page.wait_for_selector(".turn-end")
    assert "stopped" in here.page.inner_text(".turn-end")
    stopped = here.answer()
    here.page.wait_for_timeout(300)
    assert here.answer() == stopped
    with urlopen(f"{address}/metrics") as metrics:
        assert "\noutrider_requests_running 0\n" in metrics.read().decode()
    here.page.unroute(COMPLETIONS)
    here.set(max_tokens=5)
    here.ask("Once more.")
    assert here.page.locator(".answer").count() == 2


def test_regenerate_clear_and_undo(visit: Open) -> None:
    here = visit()
    here.set(seed=5, max_tokens=10)
    answer = here.ask("Say something.")
    ends = "[...document.querySelectorAll('.turn-end')].length"
    here.page.click(".again")
    here.until(f"{ends} === 1")
    assert here.answer() == answer and here.page.locator(".answer").count() == 1  # the same seed
    assert len(here.bodies) == 2 and here.bodies[0] == here.bodies[1]
    here.set(seed=6)
    here.page.click(".again")
    here.until(f"{ends} === 1")
    changed = here.answer()
    assert changed != answer
    here.page.click("#clear")
    assert here.page.locator(".turn").count() == 0 and here.page.is_visible("#welcome")
    here.page.click("text=Undo")
    assert here.answer() == changed


def test_copy(visit: Open, address: str) -> None:
    here = visit(permissions=["clipboard-read", "clipboard-write"])
    here.set(max_tokens=8)
    answer = here.ask("Say something.")
    here.page.click(".actions >> text=Copy")
    here.page.wait_for_selector("text=Copied")
    assert here.page.evaluate("navigator.clipboard.readText()") == answer


def test_settings_reach_the_request_and_are_kept(visit: Open) -> None:
    here = visit()
    here.ask("As it comes.")
    assert {"temperature", "top_p", "seed"}.isdisjoint(here.bodies[0])
    assert here.bodies[0]["speculation"] == {"trace": True} and here.bodies[0]["max_tokens"] == 512
    here.set(temperature=0.3, top_p=0.9, max_tokens=20, seed=11, system="Be brief.")
    here.set(method="model", width=3, tree="off")
    here.page.reload()
    here.ask("As I like it.")
    body = here.bodies[-1]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.3, 0.9, 20, 11)
    assert body["speculation"] == {"trace": True, "draft": "model", "width": 3, "tree": False}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    here.set(method="none")
    here.ask("And plainly.")
    assert here.bodies[-1]["speculation"] == {"trace": True, "draft": "none"}
    assert here.page.locator(".answer").last.locator(".kept, .replaced, .bonus").count() == 0
    here.page.click("#open-settings")
    here.page.fill("#set-temperature", "-1")
    assert here.page.locator("#set-temperature[aria-invalid=true]").count() == 1
    here.page.click("#reset-settings")
    here.page.click("#close-settings")
    here.ask("As at first.")
    assert {"temperature", "top_p", "seed"}.isdisjoint(here.bodies[-1]) and here.bodies[-1]["max_tokens"] == 512


@pytest.mark.parametrize("draw", ["greedy", "seeded"])
def test_race(visit: Open, shoot: Callable[[Visit, str], None], draw: str) -> None:
    here = visit()
    here.change_bodies(lambda body: {**body, "ignore_eos": True})
    here.set(max_tokens=120)
    here.page.click("#to-race")
    here.page.fill("#race-prompt", "Who is faster?")
    here.page.check(f"#race-{draw}")
    here.page.click("#race-start")
    here.page.wait_for_selector("#verdict.good")
    assert "identical" in here.page.inner_text(".verdict-text")
    assert re.match(r"\d+\.\d\d\u00d7", here.page.inner_text(".verdict-speed"))
    speculative, plain = here.page.locator("#lane-speculative"), here.page.locator("#lane-plain")
    assert speculative.locator(".answer-text").text_content() == plain.locator(".answer-text").text_content() != ""
    assert speculative.locator(".kept").count() and not plain.locator(".kept, .bonus, .replaced").count()
    assert "120 tokens in 120 rounds" in plain.inner_text() and "tokens/s" in speculative.inner_text()
    assert [body["speculation"].get("off", False) for body in here.bodies] == [False, True]
    own = {"greedy": ("temperature", 0), "seeded": ("seed", 1)}[draw]
    assert all(body[own[0]] == own[1] for body in here.bodies)
    assert "\u00d7" in here.page.inner_text("#speedup")
    shoot(here, f"race-{draw}")


def test_race_cancelled_and_raced_again(visit: Open) -> None:
    here = visit()
    here.make_long()
    here.page.click("#to-race")
    here.page.fill("#race-prompt", "Who is faster?")
    here.page.click("#race-start")
    here.page.wait_for_selector("#lane-speculative .round")
    here.page.click("#race-cancel")
    here.page.wait_for_selector("text=Cancelled.")
    here.page.unroute(COMPLETIONS)
    here.set(max_tokens=20)
    here.page.click("#race-start")
    here.page.wait_for_selector("#verdict.good")


def test_race_shows_the_first_difference(visit: Open) -> None:
    here = visit()

    def answer(route: Any) -> None:
        is_plain = json.loads(route.request.post_data)["speculation"].get("off")
        text = ["one two three", "one two four"][bool(is_plain)]
        chunk = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    here.page.route(COMPLETIONS, answer)
    here.page.click("#to-race")
    here.page.fill("#race-prompt", "Count.")
    here.page.click("#race-start")
    here.page.wait_for_selector("#verdict.bad")
    assert "differ from character 9" in here.page.inner_text("#verdict")
    assert "too short" in here.page.inner_text("#verdict")
    assert here.page.locator("mark").all_text_contents() == ["three", "four"]


def test_narrow_screen(visit: Open, shoot: Callable[[Visit, str], None]) -> None:
    here = visit(width=360, height=740, has_touch=True, is_mobile=True, device_scale_factor=2)
    page = here.page
    assert here.overflow() <= 0
    page.click("#open-settings")
    page.fill("#set-max-tokens", "60")
    assert here.overflow() <= 0
    shoot(here, "narrow-settings")
    page.keyboard.press("Escape")
    assert not page.is_visible("#settings")
    page.fill("#prompt", "w" * 200)
    page.tap("#send")
    page.wait_for_selector(".turn-end")
    assert here.overflow() <= 0
    page.locator(".round").first.tap()
    assert page.is_visible("#hint") and here.overflow() <= 0
    shoot(here, "narrow-chat")
    page.tap("#to-race")
    page.fill("#race-prompt", "Who is faster?")
    page.tap("#race-start")
    page.wait_for_selector("#verdict.good")
    assert here.overflow() <= 0
    shoot(here, "narrow-race")
    for control in ("#theme", "#open-settings", "#to-chat", "#tint"):
        box = page.locator(control).bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 360, control


def test_dark_by_the_system_and_by_choice(visit: Open, shoot: Callable[[Visit, str], None]) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit(), visit(color_scheme="dark")
    assert light.page.evaluate(ground) != dark.page.evaluate(ground)
    dark.set(max_tokens=150)
    dark.change_bodies(lambda body: {**body, "ignore_eos": True})
    dark.ask("Good night.")
    shoot(dark, "dark-chat")
    own = light.page.evaluate(ground)
    for _ in range(2):  # to light, to dark
        light.page.click("#theme")
    assert light.page.evaluate(ground) == dark.page.evaluate(ground) != own
    light.page.reload()
    assert light.page.evaluate(ground) == dark.page.evaluate(ground)


def test_keyboard_alone(visit: Open) -> None:
    here = visit()
    keys, focused = here.page.keyboard, "document.activeElement.id"
    is_round = "document.activeElement.matches('.round')"
    assert here.page.evaluate(focused) == "prompt"
    here.change_bodies(lambda body: {**body, "ignore_eos": True, "max_tokens": 30})
    keys.type("first line")
    keys.press("Shift+Enter")
    keys.type("second line")
    keys.press("Enter")
    here.page.wait_for_selector(".turn-end")
    assert here.bodies[0]["messages"][0]["content"] == "first line\nsecond line"
    assert here.page.evaluate(focused) == "prompt"
    for _ in range(4):  # back over Regenerate and Copy to the text
        if not here.page.evaluate(is_round):
            keys.press("Shift+Tab")
    assert here.page.evaluate(is_round)
    assert here.page.inner_text(".hint-head").startswith("Round 1:")
    keys.press("ArrowRight")
    here.until("document.querySelector('.hint-head')?.textContent.startsWith('Round 2:')")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert here.page.evaluate(outline) == "solid"
    keys.press("Escape")
    assert not here.page.is_visible("#hint")
    for _ in range(12):
        if here.page.evaluate(focused) != "open-settings":
            keys.press("Shift+Tab")
    keys.press("Enter")
    assert here.page.is_visible("#settings")
    keys.press("Escape")
    assert not here.page.is_visible("#settings") and here.page.evaluate(focused) == "open-settings"
    here.page.focus("#to-race")
    keys.press("Enter")
    here.until(f"{focused} === 'race-prompt'")
    keys.type("Who is faster?")
    keys.press("Enter")
    here.page.wait_for_selector("#verdict.good")


def test_an_error_is_said_and_nothing_is_lost(visit: Open, shoot: Callable[[Visit, str], None]) -> None:
    here = visit()
    here.set(max_tokens=10)
    answer = here.ask("All is well.")
    here.set(max_tokens=999_999_999)
    here.send("Too much.")
    notice = here.page.locator(".notice")
    notice.wait_for()
    assert "max_tokens" in notice.inner_text() and notice.inner_text().endswith(".")
    assert here.page.input_value("#prompt") == "Too much." and here.page.locator(".question").count() == 1
    here.page.locator(".again").last.click()
    notice.wait_for()
    assert here.page.locator(".answer").count() == 1 and here.answer() == answer  # the old one stays
    shoot(here, "error")
    here.set(max_tokens=10)
    here.page.press("#prompt", "Enter")
    here.until("document.querySelectorAll('.turn-end').length === 2")
    assert notice.count() == 0 and here.page.input_value("#prompt") == ""
    here.forgive_refusals()


def test_a_connection_that_fails(visit: Open) -> None:
    here = visit()
    here.page.route(COMPLETIONS, lambda route: route.abort())
    here.send("Hello?")
    here.page.wait_for_selector(".notice")
    assert "cannot be reached" in here.page.inner_text(".notice")
    half = {"choices": [{"delta": {"content": "Half an"}}]}
    broken = {"error": {"message": "the engine died; start the server again"}}
    for chunks, said in (([half, broken], "The engine died; start the server again."), ([half], "connection ended")):
        here.reply(*chunks, end="")
        here.ask("Hello?")
        assert said in here.page.inner_text(".notice") and here.answer() == "Half an"
        assert "broken off" in here.page.locator(".turn-end").last.inner_text()
    here.page.unroute(COMPLETIONS)
    here.set(max_tokens=5)
    here.ask("Hello again?")
    assert here.page.locator(".notice").count() == 0
    here.forgive_refusals()


def test_a_model_without_a_chat_template(visit: Open, address: str) -> None:
    here = visit()
    with urlopen(f"{address}/v1/models") as models:
        listed = json.load(models)
    listed["data"][0]["chat"] = False
    here.page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    here.page.reload()
    here.page.wait_for_selector("#no-template")
    here.set(max_tokens=8)
    assert here.ask("Once upon a time")
    assert here.bodies[-1]["prompt"] == "Once upon a time" and "messages" not in here.bodies[-1]


def test_clear_and_reload_while_an_answer_comes(visit: Open) -> None:
    here = visit()
    here.make_long()
    here.send("Go on and on.")
    here.wait_for_growth("", beyond=40)
    here.page.reload()
    here.page.wait_for_selector(".turn-end")
    assert len(here.answer()) > 40 and re.search("stopped|broken off", here.page.inner_text(".turn-end"))
    here.send("And on.")
    here.until("document.querySelectorAll('.answer').length === 2")
    here.page.click("#clear")
    here.page.wait_for_selector("#send")
    assert here.page.locator(".turn").count() == 0
    here.page.unroute(COMPLETIONS)
    here.set(max_tokens=5)
    here.ask("Something else.")
    assert [message["content"] for message in here.bodies[-1]["messages"]] == ["Something else."]


def test_api_key(visit: Open, shoot: Callable[[Visit, str], None]) -> None:
    with serving("mock-text", "--api-key", "right") as closed:
        here = visit(closed)
        page = here.page
        assert page.is_visible("#key") and page.evaluate("document.activeElement.id") == "key"
        shoot(here, "key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        here.until("document.getElementById('key-note').textContent.includes('does not know')")
        page.fill("#key", "right")
        page.press("#key", "Enter")
        here.until("document.getElementById('model').textContent === 'mock-text'")
        assert not page.is_visible("#key")
        here.set(max_tokens=5)
        here.ask("Hello?")
        page.reload()
        here.until("document.getElementById('model').textContent === 'mock-text'")
        assert "right" not in page.evaluate("JSON.stringify(localStorage)")
        here.forgive_refusals()


def test_follows_the_text_only_at_its_end(visit: Open) -> None:
    here = visit(height=500)
    here.make_long()
    here.send("A long one.")
    here.wait_for_growth("", beyond=3000)
    scroller = "document.getElementById('transcript')"
    rest = f"{scroller}.scrollHeight - {scroller}.clientHeight - {scroller}.scrollTop"
    here.until(f"{rest} < 60")
    here.page.hover("#transcript")
    here.page.mouse.wheel(0, -250)
    here.until(f"{rest} > 100")
    here.page.wait_for_timeout(100)
    place = here.page.evaluate(f"{scroller}.scrollTop")
    here.wait_for_growth(here.answer(), beyond=len(here.answer()) + 800)
    assert here.page.evaluate(f"{scroller}.scrollTop") == place
    here.page.click("#stop")
    here.page.wait_for_selector(".turn-end")


def test_reduced_motion(visit: Open) -> None:
    here = visit(reduced_motion="reduce")
    here.make_long()
    here.send("Quietly.")
    here.wait_for_growth("")
    style = "getComputedStyle(document.querySelector('.is-live .answer-text'), '::after').animationName"
    assert here.page.evaluate(style) == "none"
    here.page.keyboard.press("Escape")
    here.page.wait_for_selector(".turn-end")
