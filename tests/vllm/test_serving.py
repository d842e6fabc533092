"""`vllm serve` with two API servers, and an engine of two ranks."""

from __future__ import annotations

import concurrent.futures
import math

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


def test_two_ranks_load_what_they_saved() -> None:
    with kit.scratch() as directory, kit.running_broker(directory / "broker") as broker:
        probe = kit.Probe(directory)
        arguments = {"ec_transfer_config": kit.transfer(broker.directory), "tensor_parallel_size": 2}
        two_nodes = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
        with kit.program(directory, probe, two_nodes, **arguments) as engine:
            prompts = [[1], [2, 3]]
            eventually(lambda: kit.tally(broker.status(), "/scheduler"), "the scheduler has joined", 30)
            first = engine.ask(*prompts)
            eventually(lambda: probe.count("saved") == 3, "saves", 30)
            engine.forget()
            with probe.change() as change:
                second = engine.ask(*prompts)
            assert change == {"processed": 0, "encoded": 0}
            assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
            assert all(math.isclose(a, b, abs_tol=1e-3) for (_, a), (_, b) in zip(first, second, strict=True))
            for rank in range(2):
                role = f"/worker-{rank}"
                eventually(
                    lambda role=role: kit.tally(broker.status(), role).get("worker_loads") == 3,
                    f"loads of {role}",
                )
            assert kit.tally(broker.status(), "/worker-1").get("saved", 0) == 0, "one rank saves"
