"""Labels of a training set from teachers: scores in shards, their scaling and sampling, agreement with judgements."""
