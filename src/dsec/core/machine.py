"""The life of a sandbox: state and event in, state and command out. Nothing is done here."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from dsec.errors import Conflict
from dsec.model.sandbox import State


class Event(Enum):
    """What happens to a sandbox."""

    STARTED = auto()  # the runtime has made it
    CREATE_FAILED = auto()  # the runtime could not
    PAUSE_ASKED = auto()
    FREEZE_FAILED = auto()  # ... and its processes go on
    RESUME_ASKED = auto()
    HIBERNATE_ASKED = auto()
    REBOOTED = auto()  # the machine was restarted, and its files are kept
    WOKEN = auto()  # the runtime has made it again
    INIT_DIED = auto()  # it ended without being asked to
    MISSING = auto()  # recorded, and not found running after a restart
    DESTROY_ASKED = auto()  # by anybody, or by a deadline
    REMOVED = auto()  # nothing of it is left


class Command(Enum):
    """What is to be done next."""

    FREEZE = auto()
    THAW = auto()
    PARK = auto()  # end every process and keep its files
    REMOVE = auto()  # end every process and remove everything, until that has succeeded


Decision = tuple[State, tuple[Command, ...]]

_REMOVE: Final = (Command.REMOVE,)
_PARK: Final = (Command.PARK,)

# Asking for what is already so is no error: those rows keep the state and command nothing.
_TABLE: Final[dict[tuple[State, Event], Decision]] = {
    (State.PENDING, Event.STARTED): (State.RUNNING, ()),
    (State.PENDING, Event.CREATE_FAILED): (State.FAILED, _REMOVE),
    (State.PENDING, Event.INIT_DIED): (State.FAILED, _REMOVE),
    (State.PENDING, Event.MISSING): (State.FAILED, _REMOVE),
    (State.PENDING, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    (State.RUNNING, Event.PAUSE_ASKED): (State.PAUSED, (Command.FREEZE,)),
    (State.RUNNING, Event.RESUME_ASKED): (State.RUNNING, ()),
    (State.RUNNING, Event.INIT_DIED): (State.FAILED, _REMOVE),
    (State.RUNNING, Event.MISSING): (State.LOST, _REMOVE),
    (State.RUNNING, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    (State.PAUSED, Event.PAUSE_ASKED): (State.PAUSED, ()),
    (State.PAUSED, Event.FREEZE_FAILED): (State.RUNNING, (Command.THAW,)),
    (State.PAUSED, Event.RESUME_ASKED): (State.RUNNING, (Command.THAW,)),
    (State.PAUSED, Event.INIT_DIED): (State.FAILED, _REMOVE),
    (State.PAUSED, Event.MISSING): (State.LOST, _REMOVE),
    (State.PAUSED, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    # Dormant. While one is woken its state stays: what was half woken when the engine died is put to rest by the next.
    (State.RUNNING, Event.HIBERNATE_ASKED): (State.HIBERNATED, _PARK),
    (State.PAUSED, Event.HIBERNATE_ASKED): (State.HIBERNATED, _PARK),
    (State.RUNNING, Event.REBOOTED): (State.HIBERNATED, _PARK),
    (State.PAUSED, Event.REBOOTED): (State.HIBERNATED, _PARK),
    (State.RUNNING, Event.WOKEN): (State.RUNNING, ()),
    (State.HIBERNATED, Event.HIBERNATE_ASKED): (State.HIBERNATED, ()),
    (State.HIBERNATED, Event.REBOOTED): (State.HIBERNATED, ()),
    (State.HIBERNATED, Event.WOKEN): (State.RUNNING, ()),
    (State.HIBERNATED, Event.INIT_DIED): (State.HIBERNATED, ()),
    (State.HIBERNATED, Event.MISSING): (State.LOST, _REMOVE),  # its files are not there any more
    (State.HIBERNATED, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    (State.COLD, Event.HIBERNATE_ASKED): (State.COLD, ()),
    (State.COLD, Event.WOKEN): (State.RUNNING, ()),
    (State.COLD, Event.INIT_DIED): (State.COLD, ()),
    (State.COLD, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    (State.COLD, Event.REMOVED): (State.GONE, ()),  # it never was anything but a record
    # A create that ends while the sandbox is already being destroyed changes nothing: removal waits for it.
    (State.STOPPING, Event.STARTED): (State.STOPPING, ()),
    (State.STOPPING, Event.WOKEN): (State.STOPPING, ()),
    (State.STOPPING, Event.CREATE_FAILED): (State.STOPPING, ()),
    (State.STOPPING, Event.FREEZE_FAILED): (State.STOPPING, ()),
    (State.STOPPING, Event.INIT_DIED): (State.STOPPING, ()),
    (State.STOPPING, Event.MISSING): (State.STOPPING, ()),
    (State.STOPPING, Event.DESTROY_ASKED): (State.STOPPING, ()),
    (State.STOPPING, Event.REMOVED): (State.GONE, ()),
    (State.FAILED, Event.CREATE_FAILED): (State.FAILED, ()),
    (State.FAILED, Event.FREEZE_FAILED): (State.FAILED, ()),
    (State.FAILED, Event.INIT_DIED): (State.FAILED, ()),
    (State.FAILED, Event.MISSING): (State.FAILED, ()),
    (State.FAILED, Event.REMOVED): (State.FAILED, ()),
    (State.FAILED, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    (State.LOST, Event.INIT_DIED): (State.LOST, ()),
    (State.LOST, Event.MISSING): (State.LOST, ()),
    (State.LOST, Event.REMOVED): (State.LOST, ()),
    (State.LOST, Event.DESTROY_ASKED): (State.STOPPING, _REMOVE),
    (State.GONE, Event.DESTROY_ASKED): (State.GONE, ()),
    (State.GONE, Event.REMOVED): (State.GONE, ()),
    (State.GONE, Event.INIT_DIED): (State.GONE, ()),
    (State.GONE, Event.MISSING): (State.GONE, ()),
}

LIVE: Final = (State.PENDING, State.RUNNING, State.PAUSED, State.STOPPING)
DORMANT: Final = (State.HIBERNATED, State.COLD)
ENDED: Final = (State.GONE, State.FAILED, State.LOST)


def decide(state: State, event: Event) -> Decision:
    """What ``event`` makes of a sandbox in ``state``.

    Raises:
        Conflict: that cannot happen to a sandbox in this state.
    """
    decision = _TABLE.get((state, event))
    if decision is None:
        asked = event.name.lower().replace("_", " ")
        raise Conflict(
            f"a sandbox that is {state} has no {asked!r}", state=state.value, event=event.name.lower()
        )
    return decision
