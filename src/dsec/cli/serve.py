"""`dsec serve`: the engine of lasting sandboxes for many."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop

from dsec.cli.codes import SIGNALLED
from dsec.cli.output import note
from dsec.cli.session import WAIT, engine_home, taken
from dsec.cli.succession import succession
from dsec.core.residence import SERVED, Residence
from dsec.model.admission import AT_ONCE, QUEUE
from dsec.model.alerts import Alert
from dsec.stores.schema import Durability
from dsec.wiring.serving import Place, Running, serving
from dsec.wiring.settings import Settings, host_paths_of
from dsec.wiring.tenants import shared

app = typer.Typer()

_YOUNG: Final = 10_000  # objects that are new, before the collector looks at them


Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of HTTP; 0 = one that is free.")]
NoHttp = Annotated[bool, typer.Option("--no-http", "--socket-only", help="Listen on the socket alone.")]
Insecure = Annotated[bool, typer.Option("--insecure-host", help="Let other machines reach it without TLS.")]
HomeDirectory = Annotated[
    Path | None,
    typer.Option("--home", help="State directory of the engine; by default $DSEC_HOME/engine."),
]
Pool = Annotated[
    int | None,
    typer.Option("--pool", min=0, max=1000, help="Ready sandboxes kept at most.  [default: 4]"),
]
UntilIdle = Annotated[
    float,
    typer.Option(
        "--until-idle",
        min=0,
        help="End after so many seconds in which nobody asked and nothing ran; 0 = never.",
    ),
]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for whoever has the engine.")]
DurabilityName = Annotated[
    str,
    typer.Option(
        "--durability",
        help="What acknowledged things survive: `process` (kill -9) or `disk` (power loss).",
    ),
]
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database",
        envvar="DSEC_DATABASE",
        help="postgresql://... keeps records and keys there. [default: SQLite in the home, or where they were kept last]",
        show_envvar=True,
        show_default=False,
    ),
]
Creations = Annotated[
    int, typer.Option("--creations", min=1, max=1024, help="Sandboxes that are made at the same time.")
]
Queue = Annotated[
    int, typer.Option("--queue", min=0, help="Creations that may wait; beyond it they are busy at once.")
]
AlertTo = Annotated[
    str,
    typer.Option(
        "--alert",
        envvar="DSEC_ALERT",
        help="Who is told of problems: a URL, or the absolute path of a program.",
        show_envvar=True,
    ),
]
Freeze = Annotated[
    float,
    typer.Option(
        "--freeze",
        min=0,
        help="Freeze a sandbox after so many seconds without use; its next use thaws it. 0 = never.",
    ),
]
HibernateAfter = Annotated[
    float,
    typer.Option(
        "--hibernate",
        min=0,
        help="Keep only the files of one without processes after so many seconds without use; its next use wakes it. 0 = never.",
    ),
]


@app.command()
def serve(
    host: Host = "127.0.0.1",
    port: Port = 7070,
    no_http: NoHttp = False,
    insecure_host: Insecure = False,
    home: HomeDirectory = None,
    pool: Pool = None,
    until_idle: UntilIdle = 0.0,
    wait: Wait = WAIT,
    durability: DurabilityName = "process",
    database: DatabaseUrl = "",
    creations: Creations = AT_ONCE,
    queue: Queue = QUEUE,
    alert: AlertTo = "",
    freeze: Freeze = SERVED.freeze,
    hibernate: HibernateAfter = SERVED.hibernate,
) -> None:
    """Serve lasting sandboxes over HTTP and a socket.

    It ends with a signal; sandboxes live on. A server that a command started for itself gives the engine over. The socket, $DSEC_HOME/dsec.sock, is for the user whose engine it is; HTTP needs a key (`dsec key create`). The first signal lets what runs be answered, the second ends it at once.

    Examples:

        dsec serve

        curl --unix-socket "$DSEC_HOME/dsec.sock" http://dsec/v1/sandboxes
    """
    where = engine_home() if home is None else home.absolute()
    place = Place(
        home=where.parent if home is None else where,
        host="" if no_http else host,
        port=port,
        insecure_host=insecure_host,
    )
    settings = Settings(
        home=where,
        wait=wait,
        pool=(0 if until_idle else 4) if pool is None else pool,
        host_paths=host_paths_of(os.environ.get("DSEC_HOST_PATHS")),
        durability=_durability(durability),
        residence=Residence(freeze=freeze, hibernate=hibernate),
        database=database,
        creations=creations,
        creation_queue=queue,
        alert=_alert(alert),
    )
    with taken(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(place, settings, until_idle))


def _settle() -> None:
    """What was made to start stays for good: the collector of cycles need not look at it again, and may look less often."""
    gc.freeze()
    gc.set_threshold(_YOUNG)


def _alert(text: str) -> Alert | None:
    """Raises: BadRequest."""
    if not text:
        return None
    return Alert(command=(text,)) if text.startswith("/") else Alert(url=text)


def _durability(text: str) -> Durability:
    """Raises: BadRequest: by the settings."""
    given: Any = text
    chosen: Durability = given
    return chosen


async def _serve(place: Place, settings: Settings, until_idle: float) -> None:
    """Until a signal, or nobody needs it any more."""
    stopping = _on_signals()
    async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as beginning:
        if not until_idle:
            await beginning.enter_async_context(succession(place.home))
        running = await stack.enter_async_context(serving(place, settings, shared))
        await beginning.aclose()
        _settle()
        _announce(running)
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(stopping.wait())]
        if until_idle:
            waits.append(asyncio.ensure_future(running.idle(until_idle)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if stopping.is_set():
            note("stopping: what runs is answered, sandboxes live on; once more ends it at once")


def _on_signals() -> asyncio.Event:
    """Set by the first signal; the second ends us at once, which loses nothing that was acknowledged."""
    stopping = asyncio.Event()

    def caught(signo: int) -> None:
        if stopping.is_set():
            os._exit(SIGNALLED + signo)
        stopping.set()

    loop = asyncio.get_running_loop()
    for signo in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signo, caught, signo)
    return stopping


def _announce(running: Running) -> None:
    if running.url:
        note(f"{running.url} (documents: {running.url}/docs)")
        note("a key: `dsec key create --scope developer`")
    note(f"socket: {running.socket} (no key for uid {os.geteuid()})")
