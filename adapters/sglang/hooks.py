"""The hooks themselves, as thin as they can be: each hands over to the producer or the consumer of its process.

All are AROUND hooks of `HookRegistry`: they get the original and its arguments. The producer and the consumer hang on
SGLang's own objects, so two engines in one process do not meet.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from . import export, measure, settings

logger = logging.getLogger(__name__)

_OURS: Final = "_mmbroker"
Original = Callable[..., Any]

# --- the arguments --------------------------------------------------------------------------------------------------


def resolve(original: Original, args: Any, *rest: Any) -> Any:
    """AROUND the place where SGLang's arguments are resolved, on the way of the command line and of `Engine` alike."""
    from . import flags

    if settings.read().broker and not getattr(args, "_resolution_finished", False):
        why = flags.stands_aside(args)
        if why is not None:
            flags.stand_aside(why)
        else:
            if args.mm_feature_transport is None:
                # Otherwise some models choose a transport on their own that hides the features from the plugin.
                args.mm_feature_transport = "cpu"
            if _idles_alone(args):
                # A scheduler that spins while there is nothing to do lets go of the interpreter's lock for a moment
                # only, many times a millisecond. A thread that sleeps for the lock wakes too late each time: the
                # receiver would be starved by a scheduler that waits for what the receiver has to acknowledge.
                args.sleep_on_idle = True
        if why is None and settings.read().share_outputs:
            from . import identity

            identity.note_weights(args)
    return original(args, *rest)


def _idles_alone(args: Any) -> bool:
    """Does everything that ends a scheduler's rest come by the sockets on which it would sleep? With attention's data
    parallelism and in pipelines other ranks wait for its turns, and disaggregated ones have transfers to look after, as
    have those whose encoders are elsewhere."""
    mode = getattr(args, "disaggregation_mode", None) or "null"
    ranks = [getattr(args, name, 1) or 1 for name in ("pp_size", "attn_dp_size")]
    apart = any(getattr(args, name, False) for name in ("enable_dp_attention", "language_only"))
    return mode == "null" and max(ranks) == 1 and not apart


def run_workers(original: Original, app: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `uvicorn.run`, where SGLang does not ask the environment which app its HTTP workers shall import."""
    from . import flags

    return original(flags.HTTP_APP if app == flags.SGLANGS_APP else app, *args, **kwargs)


# --- the tokenizer's process ----------------------------------------------------------------------------------------


def begin_tokenizer(original: Original, manager: Any) -> None:
    """AROUND `TokenizerManager.init_running_status`."""
    original(manager)
    asked = settings.read()
    measure.open_counters(asked.measure, "tokenizer")
    if not asked.broker:
        return
    from . import holding, seams
    from .producer import Producer

    seams.warn_of_overrides(manager)
    encoder = None
    if asked.share_outputs:
        from .identity import Encoder

        encoder = Encoder(manager, asked.engine)
    producer = Producer(asked, seams.current().identify, encoder)
    setattr(manager, _OURS, producer)
    if getattr(manager, "mm_processor", None) is not None:
        setattr(manager.mm_processor, _OURS, producer)
        if asked.on_cpu:
            from . import preprocessing

            preprocessing.stay_on_cpu(manager)
        enable = importlib.import_module(f"{__package__}.{seams.current().finder}").enable
        producer.finder = enable(manager.mm_processor, manager.server_args, producer.asking)
        measure.counters.add("content" if producer.finder is None else "derived")
        if asked.on_cpu or producer.finder is not None:
            seams.warn_of_overrides(manager.mm_processor)
    export.start(manager.server_args, asked.engine, None)
    manager.rid_to_state = holding.States(manager.rid_to_state, producer.claims.left)


def generate_request(original: Original, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND the async generator `TokenizerManager.generate_request`."""
    answers = original(manager, *args, **kwargs)
    producer = getattr(manager, _OURS, None)
    if producer is None:
        return answers
    from . import holding

    return holding.first_answer_ends(answers, producer.claims)


async def tokenize(original: Original, manager: Any, request: Any) -> Any:
    """AROUND the coroutine `TokenizerManager._tokenize_one_request`."""
    producer = getattr(manager, _OURS, None)
    if producer is None:
        return await original(manager, request)
    return await producer.tokenize(original, manager, request)


def send(original: Original, manager: Any, tokenized: Any) -> Any:
    """AROUND `TokenizerManager._send_one_request`; a coroutine in newer versions, which is returned as it is."""
    producer = getattr(manager, _OURS, None)
    if producer is None:
        return original(manager, tokenized)
    return producer.send(original, manager, tokenized)


def wait_for_answer(original: Original, manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND the async generator `TokenizerManager._wait_one_response`, which looks its request up when it is first
    advanced. By then the first requests of a batch may have been answered and forgotten, since the others took their
    time to be sent: above all if they had to wait for room."""
    answers = original(manager, request, *args, **kwargs)
    state = manager.rid_to_state.get(request.rid) if getattr(manager, _OURS, None) is not None else None
    if state is None:
        return answers
    from . import holding

    return holding.answers_of(answers, manager.rid_to_state, request.rid, state)


def hear_batch(original: Original, manager: Any, received: Any) -> Any:
    """AROUND the coroutine `TokenizerManager._handle_batch_output`, where requests are given up early."""
    producer = getattr(manager, _OURS, None)
    if producer is not None and producer.claims.lingering:
        for rid, reason in zip(received.rids, received.finished_reasons, strict=False):
            if reason is not None:
                producer.claims.last_word(rid)
    return original(manager, received)


def hear_abort(original: Original, manager: Any, received: Any) -> Any:
    """AROUND `TokenizerManager._handle_abort_req`, where requests are given up early."""
    producer = getattr(manager, _OURS, None)
    if producer is not None:
        producer.claims.last_word(received.rid)
    return original(manager, received)


async def prepare_artifacts(original: Original, processor: Any, media: Any, **options: Any) -> Any:
    """AROUND the coroutines `MediaArtifactCacheMixin.prepare_media_artifacts` and the one `_without_cache`."""
    producer = getattr(processor, _OURS, None)
    if producer is None or producer.finder is None:
        return await original(processor, media, **options)
    return await producer.finder.prepare(original, media, options)


async def load_media(original: Original, processor: Any, /, *args: Any, **options: Any) -> Any:
    """AROUND the coroutine `BaseMultimodalProcessor.load_mm_data`, where nothing comes before it."""
    producer = getattr(processor, _OURS, None)
    if producer is None or producer.finder is None or args:
        return await original(processor, *args, **options)
    return await producer.finder.load(original, options)


async def begin_combining(original: Original, processor: Any, /, *args: Any, **options: Any) -> Any:
    """AROUND the coroutine `BaseMultimodalProcessor.process_and_combine_mm_data_async`."""
    producer = getattr(processor, _OURS, None)
    if producer is None or producer.finder is None or not args:
        return await original(processor, *args, **options)
    return await producer.finder.begin_combining(original, args, options)


def combine_media(original: Original, processor: Any, /, *args: Any, **options: Any) -> Any:
    """AROUND `BaseMultimodalProcessor.process_and_combine_mm_data`, whose own `processor` is one of transformers."""
    producer = getattr(processor, _OURS, None)
    if producer is None or producer.finder is None or not args:
        return original(processor, *args, **options)
    return producer.finder.combine(original, args, options)


def wrap_for_ipc(original: Original, processor: Any, tensor: Any) -> Any:
    """AROUND `BaseMultimodalProcessor._wrap_tensor_for_cuda_ipc`, which copies tensors into SGLang's pool."""
    producer = getattr(processor, _OURS, None)
    if producer is None:
        return original(processor, tensor)
    return producer.keep(lambda tensor: original(processor, tensor), tensor)


def processor_device(original: Original, processor: Any, wrapped: Any) -> Any:
    """AROUND `BaseMultimodalProcessor._fast_image_processor_device`, which says where pictures are shaped."""
    producer = getattr(processor, _OURS, None)
    return "cpu" if producer is not None and producer.on_cpu else original(processor, wrapped)


# --- the scheduler's process ----------------------------------------------------------------------------------------


def begin_scheduler(original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `Scheduler.__init__`."""
    original(scheduler, *args, **kwargs)
    from . import seams

    asked = settings.read()
    topology = seams.current().topology(scheduler)
    stage = f"-stage{topology.stage}" if topology.stage else ""
    measure.open_counters(asked.measure, f"scheduler-{topology.rank}{stage}")
    if not asked.broker:
        return
    from .consumer import Consumer

    seams.warn_of_overrides(scheduler)
    consumer = Consumer(asked, scheduler, topology, seams.current().fail)
    setattr(scheduler, _OURS, consumer)
    if topology.takes:
        export.start(scheduler.server_args, asked.engine, topology.rank, consumer.stats)


def process_requests(original: Original, scheduler: Any, arrived: Any) -> Any:
    """AROUND `Scheduler.process_input_requests`."""
    consumer = getattr(scheduler, _OURS, None)
    if consumer is None:
        return original(scheduler, arrived)
    return consumer.requests(original, scheduler, arrived)


def get_inputs(original: Original, scheduler: Any, received: Any) -> Any:
    """AROUND `Scheduler._get_multimodal_inputs`."""
    consumer = getattr(scheduler, _OURS, None)
    if consumer is None:
        return measure.inputs_hook(original, scheduler, received)
    return consumer.inputs(original, scheduler, received)


def release_features(original: Original, inputs: Any) -> None:
    """AROUND `MultimodalInputs.release_features`, which SGLang calls more than once."""
    from . import uses

    original(inputs)
    for item in inputs.mm_items:
        uses.release(item)


def release_on_abort(original: Original, req: Any) -> None:
    """AROUND `Req.release_mm_inputs_on_abort`, which forgets a session's items of this turn."""
    from . import uses

    items = list(req._session_mm_items)
    original(req)
    if req.session is not None:
        for item in items:
            uses.release(item)


def update_weights(original: Original, updater: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND the `update_weights_from_*` of `SchedulerWeightUpdaterManager`, whether or not they succeed."""
    consumer = getattr(updater.scheduler, _OURS, None)
    if consumer is not None and consumer.outputs is not None:
        consumer.outputs.weights_changed()
    return original(updater, *args, **kwargs)


# --- how one request fails ------------------------------------------------------------------------------------------


def fail_by_error(scheduler: Any, received: Any, message: str) -> Any:
    """Where the scheduler catches an error of its own for this."""
    from sglang.srt.managers import scheduler as module

    raise module._MultimodalInputProcessingError(message)


def fail_by_abort(scheduler: Any, received: Any, message: str) -> Any:
    """Where it does not: inputs without items, harmless whatever is done with them, until `add_to_queue` sees them."""
    from sglang.srt.managers import schedule_batch as module

    setattr(scheduler, _FAILED, message)
    return module.MultimodalInputs(
        mm_items=[],
        # A padded prompt as long as the plain one keeps the model's own padding away, positions keep them computed.
        padded_input_ids=list(received.input_ids) if received.input_ids is not None else None,
        mrope_positions=_zeros(3, len(received.input_ids or ())),
        mrope_position_delta=_zeros(1, 1),
    )


_FAILED: Final = "_mmbroker_failed"


def _zeros(*shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.int64)


def add_to_queue(original: Original, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `Scheduler._add_request_to_queue`."""
    message = scheduler.__dict__.pop(_FAILED, None)
    if message is not None:
        from sglang.srt.managers import schedule_batch as module

        req.set_finish_with_abort(message)
        req.to_finish = module.FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    return original(scheduler, req, *args, **kwargs)
