"""The engine process: socket loop, link to the controller, command dispatch, ranks in lockstep."""
