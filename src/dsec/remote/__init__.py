"""An engine that is reached over HTTP or a unix socket, as the services that clients use."""
