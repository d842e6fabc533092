"""`vllm serve` with two API servers."""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.kit import eventually

from . import kit, serving

pytestmark = pytest.mark.vllm

PICTURES = 4
REQUESTS = 40  # nine of ten are repeats


def test_two_api_servers_preprocess_each_picture_once() -> None:
    with kit.scratch() as directory, kit.running_broker(directory / "broker") as broker:
        probe = kit.Probe(directory)
        transfer = kit.transfer(broker.directory)
        with serving.serving(directory, probe, "--api-server-count", "2", transfer=transfer) as server:

            def joined() -> bool:
                names = {session["name"].rpartition("/")[2] for session in broker.status()["sessions"]}
                return {"scheduler", "worker-0", "items-0"} <= names

            eventually(joined, "the engine has joined", 30)
            with probe.change() as change:
                fresh = [server.ask([seed]) for seed in range(PICTURES)]
                eventually(lambda: probe.count("saved") == PICTURES, "saves", 30)
                seeds = [n % PICTURES for n in range(REQUESTS - PICTURES)]
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    again = list(pool.map(lambda seed: server.ask([seed]), seeds))
            assert again == [fresh[seed] for seed in seeds]
            assert change == {"processed": PICTURES, "encoded": PICTURES}

            def both_served() -> bool:
                with concurrent.futures.ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda seed: server.ask([seed]), range(PICTURES)))
                tallies = [kit.tally(broker.status(), f"/api-{rank}") for rank in range(2)]
                return all(tally.get("bare", 0) + tally.get("referred", 0) for tally in tallies)

            eventually(both_served, "both API servers have served", 60)
            with probe.fault("lose"):
                lost = server.ask([3, 0])
            assert lost == server.ask([3, 0]) and "is sent again" in server.text()
            broker.kill()
            assert server.ask([0]) == fresh[0], "without a broker it goes vLLM's own way"
            assert server.ask([1, 2]) == server.ask([1, 2])
            assert server.healthy()
