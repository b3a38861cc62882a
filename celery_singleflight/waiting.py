"""Ending a delivery that has to wait: its message is with the store, or goes back to the broker as a new copy."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn
from uuid import uuid4

from amqp.exceptions import MessageNacked
from celery.exceptions import Retry, SoftTimeLimitExceeded
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.exceptions import OperationalError
from kombu.serialization import registry

from celery_singleflight import headers as header, signals
from celery_singleflight.courier import careful_producer
from celery_singleflight.errors import Contended, ExecutionUncertain, ScriptError, StoreUnavailable
from celery_singleflight.message import route_of
from celery_singleflight.policies import LONGEST_DELAY, blind_delay, requeue_delay
from celery_singleflight.trigger import without_run

if TYPE_CHECKING:
    from celery import Celery

    from celery_singleflight.claims import Doubt, Held, Parked
    from celery_singleflight.trigger import Trigger

__all__ = ("await_word", "driver_of", "longest_delay", "park", "requeue", "requeue_without_store", "wait_for_successor")

logger = logging.getLogger(__name__)

#: What does not go on with the trigger: it may have been handed out, but its turn has not come.
_OF_A_DELIVERY: Final = {"redelivered", header.LINGER}
#: Seconds between two attempts to publish while the broker is away.
_BROKER_PAUSE: Final = 2.0


def requeue(trigger: Trigger, held: Held) -> NoReturn:
    """Send the trigger back with a countdown informed by what the store knows, and end this delivery.

    Raises `Retry`, so that it shows as waiting; `Ignore` when it is the trigger's own run that is in the way; `Contended` in
    eager mode, where nobody would run it later.
    """
    lock_key = trigger.lock_key.text
    blocker: Contended | ExecutionUncertain = Contended(lock_key, held.task_id, held.worker, held.age, held.remaining)
    if held.what == "uncertain":
        blocker = _uncertain(trigger, held)
    if trigger.request.is_eager:
        raise blocker
    if isinstance(blocker, Contended) and not held.is_own:
        _tell(trigger, blocker)
    app = trigger.binding.app
    countdown = requeue_delay(held, trigger.waits, longest=longest_delay(app), least=_least_delay(app))
    wait = trigger.claim.wait
    if wait is not None and not held.is_own:
        countdown = max(min(countdown, max(wait - held.waited, 0.0) + 0.01), _least_delay(app))
    place = {header.PLACE: held.ticket} if held.ticket else {}
    signature = _publish(trigger, countdown, {**_next_copy(trigger), header.FIRST_SEEN: held.first_ms, **place})
    signals.requeued.send(
        sender=trigger.task, lock_key=lock_key, task_id=trigger.request.id, countdown=countdown, waits=trigger.waits + 1
    )
    if held.is_own:
        when = f"while it runs on {held.worker}" if held.worker else "just after its end"
        trigger.leave(f"was delivered again {when}; a copy looks again in {countdown:.1f} s")
    raise without_run(Retry(exc=blocker, when=countdown, sig=signature))


def park(trigger: Trigger, parked: Parked) -> NoReturn:
    """End the delivery of a trigger whose message the store has taken.

    Raises `Retry`, so that it shows as waiting; `Ignore` when it did so before.
    """
    lock_key, task_id = trigger.lock_key.text, trigger.request.id
    if parked.how == "again":
        trigger.leave(f"was delivered again while it waits for {lock_key} in the store")
    contention = Contended(lock_key, parked.task_id, parked.worker, parked.age, parked.remaining)
    _tell(trigger, contention)
    signals.parked.send(sender=trigger.task, lock_key=lock_key, task_id=task_id, how=parked.how, place=parked.place)
    where = f"in line, behind {parked.place}" if parked.how == "line" else f"for the outcome of {parked.task_id}"
    raise without_run(Retry(f"Waits {where}: {contention}", exc=contention, when=0))


def await_word(trigger: Trigger, doubt: Doubt) -> NoReturn:
    """End the delivery of a trigger whose message the store has until somebody knows what an earlier run has done.

    Raises `Retry`, so that it shows as waiting; `Ignore` when it did so before.
    """
    if doubt.how == "again":
        trigger.leave("was delivered again while it waits for what an earlier run of its execution has done")
    raise without_run(Retry(exc=_uncertain(trigger, doubt), when=0))


def _uncertain(trigger: Trigger, found: Doubt | Held) -> ExecutionUncertain:
    error = ExecutionUncertain(trigger.execution_key, found.task_id, found.worker, found.age)
    logger.warning("%s[%s] waits: %s", trigger.task.name, trigger.request.id, error)
    signals.uncertain.send(
        sender=trigger.task,
        lock_key=trigger.lock_key.text,
        task_id=trigger.request.id,
        execution_key=trigger.execution_key,
        died_task_id=found.task_id,
        died_worker=found.worker,
        age=found.age,
    )
    return error


def requeue_without_store(trigger: Trigger, error: StoreUnavailable | ScriptError) -> NoReturn:
    """Send the trigger back as the same copy that it is: the store may or may not have seen it. Raises `Retry`."""
    countdown = blind_delay(trigger.waits, longest=longest_delay(trigger.binding.app))
    signature = _publish(trigger, countdown, {header.WAITS: trigger.waits + 1})
    # A store that is away comes back; what a script refuses to go on with is for a person, and nothing is forgotten meanwhile.
    level = logging.ERROR if isinstance(error, ScriptError) else logging.WARNING
    logger.log(level, "%s[%s] waits %.1f s for the store: %s", trigger.task.name, trigger.request.id, countdown, error)
    raise without_run(Retry(exc=error, when=countdown, sig=signature))


def wait_for_successor(trigger: Trigger, why: str) -> NoReturn:
    """Send a copy of a trigger whose run was overtaken, to find out how it ended. Raises `Ignore`."""
    countdown = max(min(2.0, longest_delay(trigger.binding.app)), _least_delay(trigger.binding.app))
    _publish(trigger, countdown, _next_copy(trigger))
    trigger.leave(why)


def longest_delay(app: Celery) -> float:
    """Return the longest countdown in seconds, so that no broker takes a waiting message for an abandoned one."""
    visibility = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    return min(LONGEST_DELAY, float(visibility) / 2) if visibility else LONGEST_DELAY


def _least_delay(app: Celery) -> float:
    """Native delayed delivery on quorum queues counts whole seconds, and fails below one."""
    return 1.0 if detect_quorum_queues(app, driver_of(app))[0] else 0.0


def driver_of(app: Celery) -> str:
    """Return what kombu calls the kind of the broker, such as "amqp" or "redis"."""
    return str(app.producer_pool.connections.connection.transport.driver_type)


def _next_copy(trigger: Trigger) -> dict[str, Any]:
    return {
        header.COPY: uuid4().hex,
        header.PREVIOUS: trigger.claim.copy,
        header.WAITS: trigger.waits + 1,
    }


def _publish(trigger: Trigger, countdown: float, headers: dict[str, Any]) -> Any:
    """Publish the trigger's message again and return its signature.

    Holds the slot until the broker has taken it: to return without would lose the trigger.
    """
    request, task = trigger.request, trigger.task
    kept = {name: value for name, value in trigger.headers.items() if name not in _OF_A_DELIVERY and not name.startswith("x-")}
    options: dict[str, Any] = {"countdown": countdown, "headers": {**kept, **headers}, "add_to_parent": False}
    content_type = (request.properties or {}).get(header.SERIALIZER)
    if content_type in registry.type_to_name:
        options["serializer"] = registry.type_to_name[content_type]
    compression = getattr(request, "compression", None)
    if compression:
        options["compression"] = compression
    signature = task.signature_from_request(request, **options)
    signature.options.update(route_of(trigger.binding.app, request))
    while True:
        try:
            with careful_producer(trigger.binding.app) as producer:
                signature.apply_async(producer=producer)
        except SoftTimeLimitExceeded:
            continue  # the limit is one of the body, which does not run
        except (OperationalError, OSError, MessageNacked) as error:
            logger.error(  # noqa: TRY400, the broker is away or does not take it, no bug here
                "%s[%s] cannot go back to the broker, its slot is held until it can: %s", task.name, request.id, error
            )
            time.sleep(_BROKER_PAUSE)
        else:
            return signature


def _tell(trigger: Trigger, contention: Contended) -> None:
    logger.info("%s[%s] waits: %s", trigger.task.name, trigger.request.id, contention)
    signals.contended.send(
        sender=trigger.task,
        lock_key=contention.lock_key,
        task_id=trigger.request.id,
        holder_task_id=contention.task_id,
        holder_worker=contention.worker,
        age=contention.age,
        remaining=contention.remaining,
    )
