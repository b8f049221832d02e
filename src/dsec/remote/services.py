"""An engine behind a server, with the services of an engine."""

from __future__ import annotations

from dsec.errors import DsecError, ProtocolError
from dsec.ports.engine import Services
from dsec.ports.trees import LocalTrees
from dsec.remote.connection import QUICK, Call, Connection
from dsec.remote.endpoint import Endpoint
from dsec.remote.execs import RemoteExecs
from dsec.remote.files import RemoteFiles, RemoteTrees
from dsec.remote.observe import RemoteObserve, RemotePorts, RemoteTenants
from dsec.remote.sandboxes import RemoteSandboxes, RemoteSnapshots
from dsec.remote.stored import RemoteImages, RemotePool, RemoteSharing, RemoteTemplates, RemoteVolumes


async def connect(endpoint: Endpoint, key: str, local: LocalTrees, *, patience: float = QUICK) -> Services:
    """Open the way to a server, and see that it answers.

    Args:
        key: "" = none, for a unix socket of our own. patience: seconds for an answer that needs no work.

    Raises:
        RuntimeUnavailable: it cannot be reached. ProtocolError: what answers there is none.
    """
    connection = Connection(endpoint, key, patience=patience)
    try:
        await connection.send(Call(method="GET", path="/health", again=True), tries=())
    except BaseException as error:
        await connection.close()
        if isinstance(error, DsecError) and error.code in ("not_found", "bad_request"):
            raise ProtocolError(
                f"what answers at {endpoint.shown} is no DSec server",
                hint="its URL, without /v1 at its end",
                server=endpoint.shown,
            ) from None
        raise
    return services_over(connection, local)


def services_over(connection: Connection, local: LocalTrees) -> Services:
    """The services of a server; closing them closes the connection."""
    files = RemoteFiles(connection)
    return Services(
        sandboxes=RemoteSandboxes(connection),
        snapshots=RemoteSnapshots(connection),
        volumes=RemoteVolumes(connection),
        templates=RemoteTemplates(connection),
        sharing=RemoteSharing(connection),
        images=RemoteImages(connection),
        execs=RemoteExecs(connection),
        files=files,
        trees=RemoteTrees(connection, files, local),
        observe=RemoteObserve(connection),
        pool=RemotePool(connection),
        ports=RemotePorts(),
        tenants=RemoteTenants(connection),
        close=connection.close,
    )
