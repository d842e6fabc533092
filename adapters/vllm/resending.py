"""A request whose entry has gone is sent once more, with its pixels: nobody outside sees it.

The engine says that it cannot serve a request by ending it with an error before its first token. Here, in the API
server, that word is kept back for requests some of whose items were carried by the broker; they are made anew from
their media and sent under the same name. If that fails, or fails again, the word is passed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from . import items

logger = logging.getLogger("vllm.mmbroker")

#: Where a request's state keeps the request that may be sent again.
_OURS: Final = "_mmbroker_request"


class Resender:
    """Of one front end: vLLM's `AsyncLLM` or `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()

    def added(self, processor: Any, request: Any) -> None:
        """vLLM has noted a request. What is held for it is held as long as vLLM keeps its state."""
        state = processor.request_states.get(request.request_id)
        if state is not None and any(isinstance(f.data, items.Carried) for f in request.mm_features or ()):
            setattr(state, _OURS, request)

    def sift(self, processor: Any, outputs: Sequence[Any]) -> list[Any]:
        """The outputs but those whose requests are sent again."""
        return [output for output in outputs if not self._again(processor, output)]

    def _again(self, processor: Any, output: Any) -> bool:
        from vllm.v1.engine import FinishReason

        if output.finish_reason is not FinishReason.ERROR or output.new_token_ids:
            return False
        state = processor.request_states.get(output.request_id)
        request = getattr(state, _OURS, None)
        if request is None or not state.is_prefilling:
            return False
        delattr(state, _OURS)
        logger.info("mmbroker: request %s is sent again, with its pixels", output.request_id)
        if not hasattr(self._engine, "output_handler"):
            try:
                _whole(request)
            except Exception:
                logger.exception("mmbroker: request %s cannot be sent again", output.request_id)
                return False
            self._engine.engine_core.add_request(request)
        else:
            task = asyncio.get_running_loop().create_task(self._send(processor, request, output))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return True

    async def _send(self, processor: Any, request: Any, output: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._engine.renderer._mm_executor, _whole, request)
            if request.request_id in processor.request_states:  # else it was aborted meanwhile
                await self._engine.engine_core.add_request_async(request)
        except Exception:
            logger.exception("mmbroker: request %s cannot be sent again", request.request_id)
            processor.process_outputs([output])


def _whole(request: Any) -> None:
    for feature in request.mm_features:
        if isinstance(feature.data, items.Carried):
            feature.data = feature.data.again()
