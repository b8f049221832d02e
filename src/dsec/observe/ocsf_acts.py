"""Which class and activity of OCSF 1.5.0 each act of the journal is."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from dsec.observe.events import GAP, REWOUND


class Class(Enum):
    """A class: its number, its name, the number and the name of its category."""

    FILE = (1001, "File System Activity", 1, "System Activity")
    PROCESS = (1007, "Process Activity", 1, "System Activity")
    LOG = (1008, "Event Log Activity", 1, "System Activity")
    ACCOUNT = (3001, "Account Change", 3, "Identity & Access Management")
    AUTHENTICATION = (3002, "Authentication", 3, "Identity & Access Management")
    ENTITY = (3004, "Entity Management", 3, "Identity & Access Management")
    API = (6003, "API Activity", 6, "Application Activity")

    def __init__(self, uid: int, title: str, category: int, category_title: str) -> None:
        self.uid = uid
        self.title = title
        self.category = category
        self.category_title = category_title


class Kind(NamedTuple):
    """A class and the activity in it; ``end``: that of a result, where it is another one."""

    of: Class
    activity: int
    name: str
    end: tuple[int, str] | None = None


_OTHER: Final = (99, "Other")
_CREATE: Final = Kind(Class.API, 1, "Create")
_READ: Final = Kind(Class.API, 2, "Read")
_UPDATE: Final = Kind(Class.API, 3, "Update")
_DELETE: Final = Kind(Class.API, 4, "Delete")
UNKNOWN: Final = Kind(Class.API, *_OTHER)
"""An act without a place in the table: nothing is left out."""

ACTS: Final[dict[str, Kind]] = {
    "sandbox.create": _CREATE,
    "sandbox.fork": _CREATE,
    "sandbox.snapshot": _CREATE,
    "sandbox.pause": _UPDATE,
    "sandbox.resume": _UPDATE,
    "sandbox.extend": _UPDATE,
    "sandbox.hibernate": _UPDATE,
    "sandbox.wake": _UPDATE,
    "sandbox.rollback": _UPDATE,
    "sandbox.destroy": _DELETE,
    "sandbox.prune": _DELETE,
    "sandbox.stray": _DELETE,
    "sandbox.failed": UNKNOWN,
    "sandbox.cleanup": UNKNOWN,
    "exec": Kind(Class.PROCESS, 1, "Launch", (2, "Terminate")),
    "exec.scratch": _CREATE,
    "decision": UNKNOWN,
    "port.connect": UNKNOWN,
    "key.create": Kind(Class.ACCOUNT, 1, "Create"),
    "key.token": Kind(Class.ACCOUNT, 1, "Create"),
    "key.revoke": Kind(Class.ACCOUNT, 6, "Delete"),
    "key.refused": Kind(Class.AUTHENTICATION, 1, "Logon"),
    "project.quota": Kind(Class.ENTITY, 3, "Update"),
    "control.begin": _CREATE,
    "files.read": Kind(Class.FILE, 2, "Read"),
    "files.download": Kind(Class.FILE, 2, "Read"),
    "files.pack": Kind(Class.FILE, 2, "Read"),
    "files.write": Kind(Class.FILE, 3, "Update"),
    "files.batch": Kind(Class.FILE, 3, "Update"),
    "files.upload": Kind(Class.FILE, 1, "Create"),
    "files.unpack": Kind(Class.FILE, 1, "Create"),
    "files.mkdir": Kind(Class.FILE, 1, "Create"),
    "files.rename": Kind(Class.FILE, 5, "Rename"),
    "files.remove": Kind(Class.FILE, 4, "Delete"),
    "files.setattr": Kind(Class.FILE, 6, "Set Attributes"),
    "volume.create": _CREATE,
    "volume.remove": _DELETE,
    "snapshot.import": _CREATE,
    "snapshot.remove": _DELETE,
    "journal.drop": Kind(Class.LOG, 2, "Delete"),
    "journal.checkpoint_cut": Kind(Class.LOG, *_OTHER),
    GAP: Kind(Class.LOG, *_OTHER),
    REWOUND: Kind(Class.LOG, *_OTHER),
}
