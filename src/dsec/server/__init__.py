"""The engine behind HTTP: shapes, routes and streams. What it does is the engine's; who may is the gate's."""
