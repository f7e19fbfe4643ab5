"""The HTTP server: `server` starts it, `app` has its routes, `engine` and `queue` build batches, `model` scores."""
