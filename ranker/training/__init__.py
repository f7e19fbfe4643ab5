"""Train under Lightning: modules, checkpoints, schedules, loggers. Read rerank_module.py first."""
