"""Reward functions: calling them by TRL's convention, combining and fingerprinting them."""
