"""Models that read several docs of a query together, so that a doc's score depends on other docs."""
