"""What is done between the logits and their log-probabilities: heat, filters, penalties, masks, shards, precision."""
