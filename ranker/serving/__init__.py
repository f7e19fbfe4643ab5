"""The HTTP server: `server` starts it, `app` has its routes, `engine` and `queue` make batches, `model` scores them."""
