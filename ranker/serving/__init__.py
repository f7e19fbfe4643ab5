"""The HTTP server: `server` starts it, `app` has its routes, `engine` makes batches, `model` scores them."""
