"""More than one of something: `vllm serve` with two API servers, or two replicas, and an engine of two ranks."""

from __future__ import annotations

import concurrent.futures
import urllib.error

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
            with probe.change() as change, concurrent.futures.ThreadPoolExecutor(64) as pool:
                asked = []

                def waits() -> int:
                    return int(broker.status()["counters"].get("waits_flight", 0))

                def both_were_asked() -> bool:
                    """The one is at it, and the other waits for it."""
                    asked.append(pool.submit(server.ask, [PICTURES]))
                    return waits() > before

                before = waits()
                with probe.fault("hold"):
                    eventually(both_were_asked, "both API servers have the same new picture")
                texts = {str(one.result()) for one in asked}
            assert len(texts) == 1 and change["processed"] == 1
            with probe.fault("fail"), pytest.raises(urllib.error.HTTPError):
                server.ask([PICTURES + 1])
            eventually(lambda: not broker.status()["promises"], "what could not be made is given back")
            assert server.ask([PICTURES + 1])
            with probe.fault("lose"):
                lost = server.ask([3, 0])
            assert lost == server.ask([3, 0]) and "is sent again" in server.text()
            broker.kill()
            assert server.ask([0]) == fresh[0], "without a broker it goes vLLM's own way"
            assert server.ask([1, 2]) == server.ask([1, 2])
            assert server.healthy()


@pytest.mark.long  # what one engine encoded another one loads: `test_identity` shows it without servers
def test_what_one_replica_encoded_the_other_loads() -> None:
    """Each has a scheduler and an encoder cache of its own; vLLM sends requests to whichever has fewer."""
    with kit.scratch() as directory, kit.running_broker(directory / "broker") as broker:
        probe = kit.Probe(directory)
        transfer = kit.transfer(broker.directory, wait=60)
        flags = ("--data-parallel-size", "2")  # and as many API servers
        with serving.serving(directory, probe, *flags, transfer=transfer, env=kit.TWO_NODES) as server:

            def joined() -> bool:
                names = [session["name"].rpartition("/")[2] for session in broker.status()["sessions"]]
                return names.count("scheduler") == 2 and {"items-0", "items-1"} <= set(names)

            eventually(joined, "both replicas have joined", 30)
            with probe.change() as change:
                fresh = [server.ask([seed]) for seed in range(PICTURES)]
                eventually(lambda: probe.count("saved") == PICTURES, "saves", 30)

                def both_loaded() -> bool:
                    with concurrent.futures.ThreadPoolExecutor(4) as pool:
                        again = list(pool.map(lambda seed: server.ask([seed]), range(PICTURES)))
                    assert again == fresh
                    replicas = {
                        session["engine"]: session["tally"].get("vllm_worker_loads", 0)
                        for session in broker.status()["sessions"]
                        if session["name"].endswith("/worker-0")
                    }
                    return len(replicas) == 2 and all(replicas.values())

                eventually(both_loaded, "each replica loads what the other has encoded", 60)
            assert change["encoded"] == PICTURES
            assert server.healthy()


@pytest.mark.long  # what each rank does is shown step by step; here it has another one beside it
def test_two_ranks_load_what_one_of_them_saved() -> None:
    with kit.scratch() as directory, kit.running_broker(directory / "broker") as broker:
        probe = kit.Probe(directory)
        arguments = {"ec_transfer_config": kit.transfer(broker.directory, wait=60), "tensor_parallel_size": 2}
        with kit.program(directory, probe, kit.TWO_NODES, **arguments) as engine:
            prompts = [[1], [2, 3]]

            def joined() -> bool:
                names = {session["name"].rpartition("/")[2] for session in broker.status()["sessions"]}
                return {"scheduler", "worker-0", "worker-1"} <= names

            eventually(joined, "all parts of the engine have joined", 30)
            first = engine.ask(*prompts)
            eventually(lambda: probe.count("saved") == 3, "saves", 30)

            def all_loaded() -> bool:
                """Unless the machine is so busy that an answer comes too late."""
                engine.forget()
                with probe.change() as change:
                    assert engine.ask(*prompts) == first
                return change["encoded"] == 0

            eventually(all_loaded, "no rank encodes what is saved", kit.PATIENCE)
            for rank in range(2):
                role = f"/worker-{rank}"
                eventually(
                    lambda role=role: kit.tally(broker.status(), role).get("worker_loads", 0) >= 3,
                    f"loads of {role}",
                    30,
                )
            assert kit.tally(broker.status(), "/worker-1").get("saved", 0) == 0, "one rank saves"
