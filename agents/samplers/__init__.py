"""Samplers: a policy's completions as sampled ids with their log-probs."""
