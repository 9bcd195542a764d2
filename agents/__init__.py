"""Policies that learn by RL and from each other: rollouts, rewards, sharing rules, objectives, and the loop around them."""
