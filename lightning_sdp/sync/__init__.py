"""Tensors between holders. Nothing in here knows of Lightning."""
