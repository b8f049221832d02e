"""What every service of the engine works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsec.node.clock import Clock
from dsec.node.guests import Guests
from dsec.node.handles import Table
from dsec.node.work import Work
from dsec.ports.admission import Admission, Always
from dsec.ports.journal import Journal, Sandboxes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """Stores, clock, handles, connections, the owner of background work, and whose turn it is to be woken."""

    journal: Journal
    sandboxes: Sandboxes
    table: Table
    guests: Guests
    work: Work
    clock: Clock
    admission: Admission = field(default_factory=Always)
