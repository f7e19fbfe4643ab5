"""Label a training set with teachers: scores in shards, scaling, sampling, agreement with judgements."""
