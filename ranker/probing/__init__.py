"""Probing: what does each layer of a frozen encoder know about a query-doc pair?

Read in this order: `examples` (data model), `tasks/` (labels), `label_store` (their cache), `pairs` (samples, splits),
`sequences` (texts to tokens), `state_cache`, `state_writer` and `state_readers` (hidden states), `probes`, `training`,
`code_length` and `online_code` (description lengths), `study` (runs all steps), `summary` and `report` (results).

A *target* is the edge-probing literature's term for one labelled item: one or two spans and their label.
"""
