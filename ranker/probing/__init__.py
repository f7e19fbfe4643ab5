"""Probing: measure what each layer of a frozen encoder encodes about a query-doc pair.

Read in this order: `examples` (data model), `tasks/` (labels), `label_store` (their cache), `pairs` (samples, splits),
`sequences` (texts to tokens), `state_cache`, `state_writer` and `state_readers` (hidden states), `probes`, `training`,
`code_length` and `online_code` (description lengths), `study` (runs all steps), `summary` and `report` (results).

A *target* is one labelled item, one or two spans with a label; the term comes from edge probing.
"""
