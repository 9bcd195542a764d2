"""Typed experience on a message bus: publish it, gather what peers published, know who is how far."""
