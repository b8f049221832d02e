"""Values: what the engine talks about, checked when made, frozen afterwards."""
