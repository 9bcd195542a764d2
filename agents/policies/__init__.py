"""Policies: a causal language model, its tokenizer, and where they live."""
