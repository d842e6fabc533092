"""The page in a real browser: it loads, keeps up, survives a broker's restart, and shows what is wrong.

Chosen only where Chromium is installed (`conftest`): the page has no build step, and neither has its test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from mmbroker.proto import messages as m
from mmbroker.proto.form import tensor_form
from mmbroker.proto.keys import Key
from tests.conftest import StartBroker
from tests.kit import BrokerProcess, RawClient

from .browser import Browser
from .test_http import port, url

pytestmark = pytest.mark.browser

BANNER = "document.getElementById('banner').dataset.state"
TEXT = "document.getElementById('{}').textContent"


@pytest.fixture
def paged(start_broker: StartBroker) -> BrokerProcess:
    return start_broker(http="127.0.0.1:0", stuck_after=0.05)


@pytest.fixture
def browser(paged: BrokerProcess) -> Iterator[Browser]:
    with Browser() as browser:
        browser.open(url(paged))
        yield browser
        assert browser.problems == []


def put(client: RawClient, name: str, nbytes: int, to: str | None = None) -> int:
    created = client.call(m.Create([m.Item(Key.caller(name), tensor_form("uint8", (nbytes,), "image"))]))
    assert isinstance(created, m.Created) and isinstance(created.results[0], m.Leased)
    return client.post(m.Seal([m.Sealing(created.results[0].lease)], to), timeout=60)


def shows(browser: Browser, part: str, text: str) -> None:
    browser.until(f"{TEXT.format(part)}.includes({text!r})", f"{text} in {part}")


def test_it_loads_and_keeps_up(paged: BrokerProcess, browser: Browser) -> None:
    browser.until(f"{BANNER} === 'good'", "a good state")
    shows(browser, "clients", "Nobody is connected")
    with RawClient(paged.directory, name="worker-<b>7</b>") as worker, RawClient(paged.directory) as rank:
        rank.call(m.Attach("engine-a", 0, 1))
        worker.answer(put(worker, "x", 3 << 20))
        shows(browser, "clients", "worker-<b>7</b>")
        shows(browser, "clients", "3 MiB")
        shows(browser, "engines", "ready")
        shows(browser, "segments", "3 MiB of 4 MiB, 1 slots")
        shows(browser, "memory", "3 MiB of 64 MiB")
    shows(browser, "clients", "Nobody is connected")
    assert browser.value("document.querySelectorAll('#charts polyline').length") >= 3


def test_it_shows_who_shares_with_other_machines(paged: BrokerProcess, browser: Browser) -> None:
    shows(browser, "movers", "Nothing is shared with other machines")
    with RawClient(paged.directory, name="mover-<b>7</b>") as mover:
        mover.call(m.Tier(True, 0.02, 64, 1))
        shows(browser, "movers", "mover-<b>7</b>")
        shows(browser, "movers", "open0 of 64")
        mover.call(m.Tier(False, 0.02, 64, 1))
        shows(browser, "movers", "closed")
    shows(browser, "movers", "Nothing is shared with other machines")


def test_the_map_tells_the_cache_from_what_is_held(paged: BrokerProcess, browser: Browser) -> None:
    """3 of 4 MiB are held, and then they are cache: 48 of 64 cells, of one colour and then of the other."""
    all_of = "[...document.querySelectorAll('#segments rect.fill-{}')]"
    drawn = all_of + ".reduce((sum, rect) => sum + Number(rect.getAttribute('height')), 0)"
    with RawClient(paged.directory) as worker:
        sealed = worker.answer(put(worker, "x", 3 << 20))
        assert isinstance(sealed, m.Sealed)
        browser.until(f"Math.round({drawn.format('use')}) === 4 * 48", "what is held")
        assert browser.value(drawn.format("cache")) == 0
        worker.cast(m.Drop([sealed.refs[0].hold]))
        browser.until(f"Math.round({drawn.format('cache')}) === 4 * 48", "what is cached")
        assert browser.value(drawn.format("use")) == 0


def test_it_asks_nobody_else(paged: BrokerProcess, browser: Browser) -> None:
    browser.until("rows.length > 0", "a row")
    assert {re.sub(r"^http://127\.0\.0\.1:\d+", "", request) for request in browser.requests} == {
        "/",
        "/events",
    }
    assert browser.value("document.querySelectorAll('script[src], link[rel=stylesheet], img').length") == 0


def test_it_shows_what_is_stuck(paged: BrokerProcess, browser: Browser) -> None:
    with RawClient(paged.directory, name="worker") as worker, RawClient(paged.directory) as rank:
        rank.call(m.Attach("engine-a", 0, 1))
        put(worker, "x", 1024, "engine-a")
        browser.until(f"{BANNER} === 'bad'", "a bad state")
        shows(browser, "banner", "rank 0")
        shows(browser, "engines", "engine-a")
        assert browser.value("document.title").startswith("⚠")
        assert browser.value("getComputedStyle(document.getElementById('banner')).display") == "block"
        rank.cast(m.Ack([rank.notice(m.Granted).grants[0].ref.hold]))
        browser.until(f"{BANNER} === 'good'", "a good state again")
        assert browser.value("getComputedStyle(document.getElementById('banner')).display") == "none"


def test_it_survives_a_brokers_restart(
    paged: BrokerProcess, browser: Browser, start_broker: StartBroker
) -> None:
    browser.until(f"{BANNER} === 'good'", "a good state")
    before = port(paged)
    paged.stop()
    browser.until(f"{BANNER} === 'lost'", "the loss is noticed")
    again = start_broker(http=f"127.0.0.1:{before}")
    shows(browser, "who", f"process {again.pid}")
    browser.until(f"{BANNER} === 'good'", "a good state again")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone(paged: BrokerProcess, dark: bool) -> None:
    with RawClient(paged.directory, name="w" * 100) as worker, Browser(390, 800, dark) as browser:
        worker.answer(put(worker, "x", 1 << 20))
        browser.open(url(paged))
        shows(browser, "clients", "www")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        paper = browser.value("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", paper)[:3])) / 3
        assert (brightness < 60) == dark
        assert browser.problems == []
