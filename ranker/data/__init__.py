"""From collections to batches. Read collection.py, datamodule.py and collate.py first."""
