"""Turn collections into batches. Read collection.py, datamodule.py and collate.py first."""
